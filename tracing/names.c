#include "tracing/names.h"

#include "tracing/state.h"

#include <string.h>

/* FNV-1a. */
static uint32_t hash_of(const char *text) {
    uint32_t hash = 0x811c9dc5u;
    for (; *text != '\0'; text++)
        hash = (hash ^ (unsigned char)*text) * 0x01000193u;
    return hash;
}

static pst__name *find(pst__name *first, const char *text) {
    pst__name *name = first;
    while (name != NULL && strcmp(name->text, text) != 0)
        name = name->next;
    return name;
}

static pst__name *add(const pst__heap *heap, pst__name **first, const char *text) {
    pst__name *name = pst__heap_alloc(heap, sizeof *name);
    if (name == NULL) return NULL;
    name->text = pst__heap_text(heap, text);
    if (name->text == NULL) {
        pst__heap_free(heap, name, sizeof *name);
        return NULL;
    }
    name->next = *first;
    *first = name;
    return name;
}

const char *pst__trace_intern(pst__trace *trace, const char *text) {
    pst__names *names = &trace->names;
    pst__name **first = &names->lists[hash_of(text) % PST__NAME_LISTS];
    (void)pthread_mutex_lock(&names->lock);
    pst__name *name = find(*first, text);
    if (name == NULL) name = add(&trace->heap, first, text);
    (void)pthread_mutex_unlock(&names->lock);
    return name == NULL ? NULL : name->text;
}

int pst__names_init(pst__names *names) {
    return pthread_mutex_init(&names->lock, NULL);
}

static void free_list(const pst__heap *heap, pst__name *first) {
    for (pst__name *name = first, *next; name != NULL; name = next) {
        next = name->next;
        pst__heap_free_text(heap, name->text);
        pst__heap_free(heap, name, sizeof *name);
    }
}

void pst__names_free(const pst__heap *heap, pst__names *names) {
    for (size_t i = 0; i < PST__NAME_LISTS; i++)
        free_list(heap, names->lists[i]);
    (void)pthread_mutex_destroy(&names->lock);
}
