/* The error text of a runtime and its log hook. */
#ifndef PST_BASE_ERROR_H
#define PST_BASE_ERROR_H

#include <ck_spinlock.h>
#include <penstock/runtime.h>

#define PST__ERROR_BYTES 1024

/* The latest text wins. The lock is held for one bounded copy and only on error paths. */
typedef struct pst__error {
    ck_spinlock_t lock;
    char text[PST__ERROR_BYTES];
    unsigned count; /* of texts so far: tells whether a call has left one */
    uint64_t born;  /* pst__now(): tells it from another one in its place */
    void (*log)(void *context, pst_log_level level, const char *text);
    void *log_context;
} pst__error;

void pst__error_init(pst__error *error, void (*log)(void *, pst_log_level, const char *),
                     void *log_context);

/* Formats the text, logs it as an error and returns `status`, so that callers can write
 * `return pst__fail(error, PST_EINVAL, "lane %s: ...", name)`. Any thread. */
pst_status pst__fail(pst__error *error, pst_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Copies the latest text that the calling thread itself has left since the first `count` texts; ""
 * if there is none. */
void pst__error_own(const pst__error *error, unsigned count, char *buffer, size_t size);

void pst__log(pst__error *error, pst_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* See pst_runtime_error. */
size_t pst__error_get(pst__error *error, char *buffer, size_t size);

#endif
