/* Counting, faults, and the lock. */
#include "internal.h"

typedef struct record {
    const char *name; /* literals */
    CUstream stream;
} record;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static record *records;
static size_t record_count, record_capacity;
static struct {
    const char *name;
    size_t left;
    CUresult error;
} fault;
static CUresult broken;
static const char *lacking;

static void note(const char *name, CUstream stream) {
    if (record_count == record_capacity) {
        record_capacity = record_capacity == 0 ? 1024 : 2 * record_capacity;
        records = realloc(records, record_capacity * sizeof *records);
        if (records == NULL) abort();
    }
    records[record_count++] = (record){name, stream};
}

static CUresult fault_of(const char *name) {
    if (fault.name == NULL || strcmp(fault.name, name) != 0 || --fault.left > 0)
        return CUDA_SUCCESS;
    fault.name = NULL;
    return fault.error;
}

CUresult fake_enter(const char *name, CUstream stream, int needs_context) {
    (void)pthread_mutex_lock(&lock);
    if (strncmp(name, "cu", 2) == 0) note(name, stream); /* not the tests' own */
    CUresult result = fault_of(name);
    if (result == CUDA_SUCCESS && needs_context)
        result = fake_has_context() ? broken : CUDA_ERROR_INVALID_CONTEXT;
    if (result != CUDA_SUCCESS) (void)pthread_mutex_unlock(&lock);
    return result;
}

void fake_leave(void) {
    (void)pthread_mutex_unlock(&lock);
}

static size_t count_calls(const char *name, int any, CUstream stream) {
    size_t count = 0;
    (void)pthread_mutex_lock(&lock);
    for (size_t i = 0; i < record_count; i++)
        count += (name == NULL || strcmp(records[i].name, name) == 0) &&
                 (any || records[i].stream == stream);
    (void)pthread_mutex_unlock(&lock);
    return count;
}

size_t fake_cuda_calls(const char *name) {
    return count_calls(name, 1, NULL);
}

size_t fake_cuda_calls_on(const char *name, CUstream stream) {
    return count_calls(name, 0, stream);
}

void fake_cuda_fail(const char *name, size_t nth, CUresult error) {
    (void)pthread_mutex_lock(&lock);
    fault.name = name;
    fault.left = nth;
    fault.error = error;
    (void)pthread_mutex_unlock(&lock);
}

void fake_cuda_break(CUresult error) {
    (void)pthread_mutex_lock(&lock);
    broken = error;
    (void)pthread_mutex_unlock(&lock);
}

void fake_cuda_lack(const char *name) {
    (void)pthread_mutex_lock(&lock);
    lacking = name;
    (void)pthread_mutex_unlock(&lock);
}

int fake_lacks(const char *name) {
    return lacking != NULL && strcmp(lacking, name) == 0;
}

void fake_cuda_reset(void) {
    fake_cuda_lack(NULL);
    fake_cuda_fail(NULL, 0, CUDA_SUCCESS);
    fake_cuda_break(CUDA_SUCCESS);
    fake_cuda_hold(0);
    fake_cuda_pace(0);
    (void)pthread_mutex_lock(&lock);
    free(records);
    records = NULL;
    record_count = record_capacity = 0;
    (void)pthread_mutex_unlock(&lock);
}
