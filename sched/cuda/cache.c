#include "base/hash.h"
#include "sched/cuda/compile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What a file begins with; the image follows. */
typedef struct header {
    char magic[8];
    uint64_t key;
    uint64_t bytes; /* of the image */
    uint64_t checksum;
} header;

static const char magic[8] = "pstcuda";

enum { LARGEST = 1 << 28 };

static uint64_t hash(const void *data, size_t bytes) {
    return pst__hash(PST__HASH_SEED, data, bytes);
}

/* ---- where ------------------------------------------------------------------------------ */

static const char *value_of(const char *variable) {
    const char *value = getenv(variable);
    return value != NULL && value[0] == '/' ? value : NULL;
}

void pst__cuda_cache_find(pst__cuda_cache *cache, const char *folder, const char *key) {
    static const char file[] = "/kernels-";
    const char *inside = "";
    if (folder == NULL) {
        inside = "/penstock";
        folder = value_of("XDG_CACHE_HOME");
    }
    if (folder == NULL) {
        inside = "/.cache/penstock";
        folder = value_of("HOME");
    }
    cache->key = hash(key, strlen(key));
    cache->path[0] = '\0';
    if (folder == NULL || folder[0] == '\0') return;
    const int length = snprintf(cache->path, sizeof cache->path, "%s%s%s%016llx", folder, inside,
                                file, (unsigned long long)cache->key);
    if (length >= (int)sizeof cache->path) cache->path[0] = '\0';
}

/* ---- reading ---------------------------------------------------------------------------- */

static int read_all(int file, void *memory, size_t bytes) {
    char *to = memory;
    while (bytes > 0) {
        const ssize_t got = read(file, to, bytes);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return -1;
        to += got;
        bytes -= (size_t)got;
    }
    return 0;
}

/* What another user could have written is not run. */
static int is_own_file(int file) {
    struct stat found;
    return fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_uid == geteuid() &&
           (found.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

static pst_status read_image(int file, uint64_t key, const pst__heap *heap,
                             pst__cuda_image *image) {
    header head;
    if (read_all(file, &head, sizeof head) != 0) return PST_EIO;
    if (memcmp(head.magic, magic, sizeof magic) != 0 || head.key != key || head.bytes == 0 ||
        head.bytes > LARGEST)
        return PST_EIO;
    image->bytes = head.bytes;
    image->data = pst__heap_alloc(heap, image->bytes);
    if (image->data == NULL) return PST_ENOMEM;
    if (read_all(file, image->data, image->bytes) == 0 &&
        hash(image->data, image->bytes) == head.checksum)
        return PST_OK;
    pst__heap_free(heap, image->data, image->bytes);
    image->data = NULL;
    return PST_EIO;
}

pst_status pst__cuda_cache_read(const pst__cuda_cache *cache, const pst__heap *heap,
                                pst__cuda_image *image) {
    image->data = NULL;
    if (cache->path[0] == '\0') return PST_EIO;
    const int file = open(cache->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* if it is no file */
    if (file < 0) return PST_EIO;
    const pst_status status =
        is_own_file(file) ? read_image(file, cache->key, heap, image) : PST_EIO;
    (void)close(file);
    return status;
}

/* ---- writing ---------------------------------------------------------------------------- */

/* Creates each folder on the way to `path` that is missing; which could not be created, opening
 * the file will say. */
static void make_folders(const char *path) {
    char folder[sizeof((pst__cuda_cache *)NULL)->path];
    const size_t length = strlen(path);
    for (size_t i = 1; i < length; i++) {
        if (path[i] != '/') continue;
        memcpy(folder, path, i);
        folder[i] = '\0';
        (void)mkdir(folder, 0700);
    }
}

static int write_all(int file, const void *memory, size_t bytes) {
    const char *from = memory;
    while (bytes > 0) {
        const ssize_t put = write(file, from, bytes);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return -1;
        from += put;
        bytes -= (size_t)put;
    }
    return 0;
}

static int write_image(int file, uint64_t key, const pst__cuda_image *image) {
    header head = {.key = key, .bytes = image->bytes, .checksum = hash(image->data, image->bytes)};
    memcpy(head.magic, magic, sizeof magic);
    return write_all(file, &head, sizeof head) != 0 ||
                   write_all(file, image->data, image->bytes) != 0
               ? -1
               : fsync(file);
}

/* Under a name of its own first: a reader of the real one sees a whole file or none. */
pst_status pst__cuda_cache_write(const pst__cuda_cache *cache, const pst__cuda_image *image) {
    char name[sizeof cache->path + 8];
    if (cache->path[0] == '\0') return PST_EIO;
    (void)snprintf(name, sizeof name, "%s.XXXXXX", cache->path);
    make_folders(cache->path);
    const int file = mkostemp(name, O_CLOEXEC);
    if (file < 0) return PST_EIO;
    const int written = write_image(file, cache->key, image) == 0;
    if (close(file) == 0 && written && rename(name, cache->path) == 0) return PST_OK;
    (void)unlink(name);
    return PST_EIO;
}
