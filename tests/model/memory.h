/* The memory behind model_allocator. */
#ifndef PST_TESTS_MODEL_MEMORY_H
#define PST_TESTS_MODEL_MEMORY_H

void model_memory_begin(void);
/* What is wrong at the end of a run: something is left, or was written to after it was freed. NULL:
 * nothing. */
const char *model_memory_fault(void);

#endif
