#include "tests/base/counting_heap.h"
#include "tests/cmocka_all.h"

static pst__heap builtin_heap(void) {
    pst__heap heap;
    assert_int_equal(pst__heap_init(&heap, NULL), PST_OK);
    return heap;
}

static int all_zero(const unsigned char *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i)
        if (memory[i] != 0) return 0;
    return 1;
}

static void builtin_memory_is_zero_and_aligned_also_when_used_again(void **state) {
    (void)state;
    pst__heap heap = builtin_heap();
    for (size_t bytes = 1; bytes < 200000; bytes = bytes * 3 + 1) {
        for (int turn = 0; turn < 2; ++turn) {
            unsigned char *memory = pst__heap_alloc(&heap, bytes);
            assert_non_null(memory);
            assert_int_equal((uintptr_t)memory % PST__CACHE_LINE, 0);
            assert_true(all_zero(memory, bytes));
            memset(memory, 0xff, bytes);
            pst__heap_free(&heap, memory, bytes);
        }
    }
}

/* Around the size of a huge page, where the alignment changes. */
static void large_builtin_memory_is_zero_and_grows_on(void **state) {
    (void)state;
    const size_t page = (size_t)2 << 20;
    const size_t sizes[] = {page - 1, page, page + 1, 5 * page + 100};
    pst__heap heap = builtin_heap();
    unsigned char *array = NULL;
    size_t capacity = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
        const size_t before = capacity;
        assert_int_equal(pst__heap_resize(&heap, (void **)&array, &capacity, sizes[i], 1), PST_OK);
        assert_int_equal((uintptr_t)array % PST__CACHE_LINE, 0);
        assert_true(all_zero(array + before, capacity - before));
        for (size_t k = 0; k < before; k += 4095)
            assert_int_equal(array[k], 0xff);
        memset(array, 0xff, capacity);
    }
    pst__heap_free(&heap, array, capacity);
}

static void no_bytes_are_memory_of_their_own(void **state) {
    (void)state;
    pst__heap heap = builtin_heap();
    void *one = pst__heap_alloc(&heap, 0), *other = pst__heap_alloc(&heap, 0);
    assert_non_null(one);
    assert_non_null(other);
    assert_ptr_not_equal(one, other);
    pst__heap_free(&heap, one, 0);
    pst__heap_free(&heap, other, 0);
}

static void more_than_there_is_yields_null(void **state) {
    (void)state;
    pst__heap heap = builtin_heap();
    assert_null(pst__heap_alloc(&heap, SIZE_MAX / 4));
}

static void freeing_null_does_nothing(void **state) {
    (void)state;
    counting_heap counts = {0};
    pst__heap heap = counting_heap_open(&counts);
    pst__heap_free(&heap, NULL, 8);
    pst__heap_free_text(&heap, NULL);
    assert_int_equal(counts.live, 0);
}

static void a_hook_without_its_partner_is_refused(void **state) {
    (void)state;
    pst__heap heap;
    assert_int_equal(pst__heap_init(&heap, &(pst_allocator){counting_alloc, NULL, NULL}),
                     PST_EINVAL);
    assert_int_equal(pst__heap_init(&heap, &(pst_allocator){NULL, counting_free, NULL}),
                     PST_EINVAL);
}

static void hooks_without_functions_are_the_builtin_heap(void **state) {
    (void)state;
    pst__heap heap;
    assert_int_equal(pst__heap_init(&heap, &(pst_allocator){0}), PST_OK);
    void *memory = pst__heap_alloc(&heap, 10);
    assert_non_null(memory);
    pst__heap_free(&heap, memory, 10);
}

static void hooks_see_all_memory_and_get_back_what_they_gave(void **state) {
    (void)state;
    counting_heap counts = {0};
    pst_allocator hooks = {counting_alloc, counting_free, &counts};
    pst__heap heap;
    assert_int_equal(pst__heap_init(&heap, &hooks), PST_OK);
    unsigned char *memory = pst__heap_alloc(&heap, 100);
    char *text = pst__heap_text(&heap, "gather");
    void *nothing = pst__heap_alloc(&heap, 0);
    assert_int_equal(counts.allocs, 3);
    assert_true(all_zero(memory, 100));
    pst__heap_free(&heap, memory, 100);
    pst__heap_free_text(&heap, text);
    pst__heap_free(&heap, nothing, 0);
    assert_int_equal(counts.live, 0);
    assert_int_equal(counts.live_bytes, 0);
    assert_int_equal(counts.misaligned, 0);
}

static void a_text_is_copied_and_null_is_empty(void **state) {
    (void)state;
    pst__heap heap = builtin_heap();
    char source[] = "reduce";
    char *copy = pst__heap_text(&heap, source), *empty = pst__heap_text(&heap, NULL);
    source[0] = 'x';
    assert_string_equal(copy, "reduce");
    assert_string_equal(empty, "");
    pst__heap_free_text(&heap, copy);
    pst__heap_free_text(&heap, empty);
}

static void a_text_without_memory_is_null(void **state) {
    (void)state;
    counting_heap counts = {.fail_at = 1};
    pst__heap heap = counting_heap_open(&counts);
    assert_null(pst__heap_text(&heap, "gather"));
}

static void growing_keeps_elements_and_zeroes_new_ones(void **state) {
    (void)state;
    counting_heap counts = {0};
    pst__heap heap = counting_heap_open(&counts);
    uint64_t *array = NULL;
    size_t capacity = 0;
    for (size_t i = 0; i < 1000; ++i) {
        assert_int_equal(pst__heap_grow(&heap, (void **)&array, &capacity, i + 1, sizeof *array),
                         PST_OK);
        assert_true(capacity > i);
        assert_int_equal(array[i], 0);
        array[i] = i + 1;
    }
    for (size_t i = 0; i < 1000; ++i)
        assert_int_equal(array[i], i + 1);
    assert_true(counts.allocs < 12); /* it doubles */
    pst__heap_free(&heap, array, capacity * sizeof *array);
    assert_int_equal(counts.live_bytes, 0);
}

static void resizing_takes_exactly_what_is_asked_for(void **state) {
    (void)state;
    counting_heap counts = {0};
    pst__heap heap = counting_heap_open(&counts);
    uint32_t *array = NULL;
    size_t capacity = 0;
    assert_int_equal(pst__heap_resize(&heap, (void **)&array, &capacity, 5, 4), PST_OK);
    assert_int_equal(array[4], 0);
    for (uint32_t i = 0; i < 5; i++)
        array[i] = i + 1;
    assert_int_equal(pst__heap_resize(&heap, (void **)&array, &capacity, 3, 4), PST_OK);
    assert_int_equal(capacity, 3);
    assert_int_equal(counts.live_bytes, 3 * 4);
    assert_int_equal(pst__heap_resize(&heap, (void **)&array, &capacity, 7, 4), PST_OK);
    assert_int_equal(counts.live_bytes, 7 * 4);
    for (uint32_t i = 0; i < 7; i++)
        assert_int_equal(array[i], i < 3 ? i + 1 : 0);
    pst__heap_free(&heap, array, capacity * 4);
    assert_int_equal(counts.live_bytes, 0);
}

static void growing_to_what_there_is_allocates_nothing(void **state) {
    (void)state;
    counting_heap counts = {0};
    pst__heap heap = counting_heap_open(&counts);
    void *array = NULL;
    size_t capacity = 0;
    assert_int_equal(pst__heap_grow(&heap, &array, &capacity, 5, 4), PST_OK);
    long allocs = counts.allocs;
    assert_int_equal(pst__heap_grow(&heap, &array, &capacity, capacity, 4), PST_OK);
    assert_int_equal(counts.allocs, allocs);
    pst__heap_free(&heap, array, capacity * 4);
}

static void growing_without_memory_changes_nothing(void **state) {
    (void)state;
    counting_heap counts = {.fail_at = 2};
    pst__heap heap = counting_heap_open(&counts);
    void *array = NULL;
    size_t capacity = 0;
    assert_int_equal(pst__heap_grow(&heap, &array, &capacity, 8, 4), PST_OK);
    void *before = array;
    assert_int_equal(pst__heap_grow(&heap, &array, &capacity, 9, 4), PST_ENOMEM);
    assert_ptr_equal(array, before);
    assert_int_equal(capacity, 8);
    pst__heap_free(&heap, array, 8 * 4);
    assert_int_equal(counts.live_bytes, 0);
}

static void growing_beyond_the_address_space_is_no_memory(void **state) {
    (void)state;
    pst__heap heap = builtin_heap();
    void *array = NULL;
    size_t capacity = 0;
    assert_int_equal(pst__heap_grow(&heap, &array, &capacity, SIZE_MAX / 4, 64), PST_ENOMEM);
    assert_int_equal(pst__heap_grow(&heap, &array, &capacity, SIZE_MAX, 1), PST_ENOMEM);
    assert_null(array);
    assert_int_equal(capacity, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(builtin_memory_is_zero_and_aligned_also_when_used_again),
        cmocka_unit_test(large_builtin_memory_is_zero_and_grows_on),
        cmocka_unit_test(no_bytes_are_memory_of_their_own),
        cmocka_unit_test(more_than_there_is_yields_null),
        cmocka_unit_test(freeing_null_does_nothing),
        cmocka_unit_test(a_hook_without_its_partner_is_refused),
        cmocka_unit_test(hooks_without_functions_are_the_builtin_heap),
        cmocka_unit_test(hooks_see_all_memory_and_get_back_what_they_gave),
        cmocka_unit_test(a_text_is_copied_and_null_is_empty),
        cmocka_unit_test(a_text_without_memory_is_null),
        cmocka_unit_test(growing_keeps_elements_and_zeroes_new_ones),
        cmocka_unit_test(resizing_takes_exactly_what_is_asked_for),
        cmocka_unit_test(growing_to_what_there_is_allocates_nothing),
        cmocka_unit_test(growing_without_memory_changes_nothing),
        cmocka_unit_test(growing_beyond_the_address_space_is_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
