#include "base/error.h"

#include "base/atomic.h"
#include "base/clock.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* What the calling thread has said last, to tell it from what others say meanwhile. */
static _Thread_local struct {
    const pst__error *to;
    uint64_t born;   /* as `to` was */
    unsigned number; /* among the texts of `to`, from 1 */
    char text[PST__ERROR_BYTES];
} said;

void pst__error_init(pst__error *error, void (*log)(void *, pst_log_level, const char *),
                     void *log_context) {
    ck_spinlock_init(&error->lock);
    error->text[0] = '\0';
    error->count = 0;
    error->born = pst__now();
    error->log = log;
    error->log_context = log_context;
}

pst_status pst__fail(pst__error *error, pst_status status, const char *format, ...) {
    char text[PST__ERROR_BYTES];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    ck_spinlock_lock(&error->lock);
    memcpy(error->text, text, sizeof text);
    pst__store_relaxed(&error->count, error->count + 1); /* calls.h reads it without the lock */
    said.number = error->count;
    ck_spinlock_unlock(&error->lock);
    said.to = error;
    said.born = error->born;
    memcpy(said.text, text, sizeof text);
    if (error->log != NULL) error->log(error->log_context, PST_LOG_ERROR, text);
    return status;
}

void pst__error_own(const pst__error *error, unsigned count, char *buffer, size_t size) {
    /* As a difference: the numbers may wrap. */
    const int is_newer =
        said.to == error && said.born == error->born && (int)(said.number - count) > 0;
    (void)snprintf(buffer, size, "%s", is_newer ? said.text : "");
}

void pst__log(pst__error *error, pst_log_level level, const char *format, ...) {
    if (error->log == NULL) return;
    char text[PST__ERROR_BYTES];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    error->log(error->log_context, level, text);
}

size_t pst__error_get(pst__error *error, char *buffer, size_t size) {
    ck_spinlock_lock(&error->lock);
    size_t length = strlen(error->text);
    if (size > 0) {
        size_t copied = length < size - 1 ? length : size - 1;
        memcpy(buffer, error->text, copied);
        buffer[copied] = '\0';
    }
    ck_spinlock_unlock(&error->lock);
    return length;
}
