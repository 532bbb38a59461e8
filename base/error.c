#include "base/error.h"

#include "base/atomic.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void pst__error_init(pst__error *error, void (*log)(void *, pst_log_level, const char *),
                     void *log_context) {
    ck_spinlock_init(&error->lock);
    error->text[0] = '\0';
    error->count = 0;
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
    pst__store_relaxed(&error->count, error->count + 1); /* failed.h reads it without the lock */
    ck_spinlock_unlock(&error->lock);
    if (error->log != NULL) error->log(error->log_context, PST_LOG_ERROR, text);
    return status;
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
