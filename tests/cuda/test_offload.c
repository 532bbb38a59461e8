/* Offload and reload through the driver's calls. */
#include "tests/ops/offload_cases.h"

#include "fixture.h"

static int setup_cuda(void **state) {
    world *w = calloc(1, sizeof *w);
    assert_int_equal(setup(&w->extra), 0);
    const fixture *f = w->extra;
    w->runtime = f->runtime;
    open_offload(w, f->device, 0);
    *state = w;
    return 0;
}

static int teardown_cuda(void **state) {
    world *w = *state;
    pst_offload_destroy(w->offload);
    assert_int_equal(teardown(&w->extra), 0);
    free(w);
    return 0;
}

static void a_copy_is_one_call_of_the_driver(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES);
    assert_ok(pst_offload_store(w->offload, 1, there, BYTES, owner(0)));
    assert_ok(pst_offload_wait_store(w->offload, 1));
    fake_cuda_reset();
    for (int i = 0; i < 5; i++) {
        assert_ok(pst_offload_store(w->offload, 1, there, BYTES, owner(0)));
        assert_ok(pst_offload_wait_store(w->offload, 1));
    }
    assert_int_equal(fake_cuda_calls("cuMemcpyAsync"), 5);
    assert_int_equal(fake_cuda_calls("cuMemHostRegister_v2"), 0);
    assert_int_equal(fake_cuda_calls("cuStreamSynchronize"), 0);
    finish_compute(w);
    free_memory(w, there, BYTES);
}

static void a_refused_copy_says_what_the_driver_said(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES);
    fake_cuda_fail("cuMemcpyAsync", 1, CUDA_ERROR_INVALID_VALUE);
    assert_ok(pst_offload_store(w->offload, 12, there, BYTES, owner(0)));
    assert_int_not_equal(pst_offload_wait_store(w->offload, 12), PST_OK);
    assert_error(w->runtime, "key 12", "cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE");
    finish_compute(w);
    free_memory(w, there, BYTES);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        OFFLOAD_CASES(setup_cuda, teardown_cuda),
        cmocka_unit_test_setup_teardown(a_copy_is_one_call_of_the_driver, setup_cuda,
                                        teardown_cuda),
        cmocka_unit_test_setup_teardown(a_refused_copy_says_what_the_driver_said, setup_cuda,
                                        teardown_cuda),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
