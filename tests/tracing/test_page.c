/* The page of a rank: what others find in it, and who may. */
#include "base/clock.h"
#include "tests/cmocka_all.h"
#include "tracing/page.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static pst_page *open_own(void) {
    pst_page *page = NULL;
    assert_int_equal(pst_page_create(&page), PST_OK);
    assert_true(page->descriptor >= 0);
    return page;
}

/* As another process finds it. */
static const pst_page *map_of(pid_t pid, int descriptor) {
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, descriptor);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(file >= 0);
    const void *memory = mmap(NULL, PST_PAGE_BYTES, PROT_READ, MAP_SHARED, file, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    (void)close(file);
    return memory;
}

static void unmap(const pst_page *page) {
    assert_int_equal(munmap((void *)(uintptr_t)page, PST_PAGE_BYTES), 0);
}

static void assert_place(const pst_page *page, const char *expected) {
    char text[128];
    uint64_t since = 0;
    pst_page_describe(page, text, sizeof text, &since);
    assert_string_equal(text, expected);
    assert_int_equal(since, page->place.since);
}

static const char *const names[] = {"", "blocks.0", "blocks.1"};

static void a_place_is_told_in_words(void **state) {
    (void)state;
    pst_page *page = open_own();
    assert_place(page, "before the first forward");
    pst_page_reach(page, 0, 2, PST_PHASE_FORWARD, 0);
    assert_place(page, "in the forward (step 0)"); /* no unit has a name yet */
    assert_int_equal(pst_page_name_units(page, names, 3), PST_OK);
    assert_int_equal(pst_page_name_units(page, names, 3), PST_ESTATE);
    assert_place(page, "in 'blocks.1' (step 0, forward)");
    pst_page_reach(page, 7, 0, PST_PHASE_CAPTURED_STEP, 1);
    assert_place(page, "behind the captured step (step 7)");
    pst_page_reach(page, 7, 3, PST_PHASE_BACKWARD, 0);
    assert_place(page, "in the backward (step 7)");
    pst_page_reach(page, 7, 1, PST_PHASE_COUNT, 0);
    assert_place(page, "before the first forward");
    pst_page_destroy(page);
    assert_int_equal(pst_page_create(NULL), PST_EINVAL);
    assert_int_equal(pst_page_name_units(NULL, names, 3), PST_EINVAL);
}

static void a_step_goes_to_where_the_next_one_begins(void **state) {
    (void)state;
    pst_page *page = open_own();
    const pst_page_place *place = &page->place;
    const uint64_t before = pst__now();
    for (uint32_t step = 0; step < 3; step++) {
        pst_page_reach(page, step, 0, PST_PHASE_FORWARD, 0);
        assert_int_equal(place->steps, step);
        assert_int_equal(place->step_began, place->since);
        pst_page_reach(page, step, 0, PST_PHASE_BACKWARD, 0);
        assert_int_equal(place->steps, step);
    }
    assert_int_equal(place->count, 6);
    assert_true(place->steps_ns <= pst__now() - before);
    pst_page_destroy(page);
}

static void names_beyond_its_end_are_left_out(void **state) {
    (void)state;
    pst_page *page = open_own();
    const char *many[100];
    char name[1000];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    for (size_t i = 0; i < 100; i++)
        many[i] = name;
    assert_int_equal(pst_page_name_units(page, many, 100), PST_OK);
    const uint32_t kept = page->unit_count;
    assert_true(kept > 50 && kept * sizeof name + page->head_bytes <= PST_PAGE_BYTES);
    char text[1100];
    pst_page_reach(page, 1, kept - 1, PST_PHASE_FORWARD, 0);
    pst_page_describe(page, text, sizeof text, NULL);
    assert_memory_equal(text, "in 'xxx", 7);
    /* As a page may be that somebody else has written. */
    page->unit_count = UINT32_MAX;
    pst_page_reach(page, 1, 0xFFFFFF, PST_PHASE_FORWARD, 0);
    assert_place(page, "in the forward (step 1)");
    pst_page_destroy(page);
}

static void it_is_its_users_alone_and_leaves_nothing(void **state) {
    (void)state;
    const int free_before = dup(0);
    (void)close(free_before);
    pst_page *page = open_own();
    struct stat stat;
    assert_int_equal(fstat(page->descriptor, &stat), 0);
    assert_int_equal(stat.st_mode & 0777, 0600);
    assert_int_equal(stat.st_size, PST_PAGE_BYTES);
    assert_int_equal(stat.st_uid, geteuid());
    pst_page_destroy(page);
    const int free_behind = dup(0);
    assert_int_equal(free_behind, free_before);
    (void)close(free_behind);
}

static void others_find_it_with_its_job_while_a_runtime_has_it(void **state) {
    (void)state;
    pst_page *page = open_own();
    const pst_page *seen = map_of(getpid(), page->descriptor);
    assert_int_equal(seen->magic, 0);
    pst__page_show(page, "run", 2, 4);
    assert_int_equal(seen->magic, PST_PAGE_MAGIC);
    assert_memory_equal(&seen->magic, "pst-page", 8);
    assert_int_equal(seen->version, PST_PAGE_VERSION);
    assert_int_equal(seen->head_bytes, offsetof(pst_page, names));
    assert_int_equal(seen->pid, getpid());
    assert_int_equal(seen->descriptor, page->descriptor);
    assert_int_equal(seen->rank, 2);
    assert_int_equal(seen->world_size, 4);
    assert_string_equal(seen->job, "run");
    pst_page_engine figures = {.gathers = 3, .bucket_bytes = 14};
    pst__page_post(page, &figures);
    assert_memory_equal(&seen->engine, &figures, sizeof figures);
    const pst_page_lane lanes[2] = {{.name = "gather", .task = "a", .ticket = 4}, {.bytes = 5}};
    pst__page_post_lanes(page, lanes, 2);
    assert_int_equal(seen->sequence, 2);
    assert_int_equal(seen->lane_count, 2);
    assert_memory_equal(seen->lanes, lanes, sizeof lanes);
    pst__page_hide(page);
    assert_int_equal(seen->magic, 0);
    pst_page_destroy(page);
    assert_int_equal(seen->lane_count, 2); /* who has mapped it keeps it */
    unmap(seen);
}

/* In a child: writes its descriptor, and stays where it is. */
static void stay(int to) {
    pst_page *page = NULL;
    if (pst_page_create(&page) != PST_OK) _exit(1);
    pst_page_reach(page, 3, 0, PST_PHASE_BACKWARD, 0);
    if (write(to, &page->descriptor, sizeof page->descriptor) < 0) _exit(1);
    for (;;)
        (void)pause();
}

static void what_a_process_wrote_stays_when_it_is_stopped_and_ended(void **state) {
    (void)state;
    int ends[2], descriptor = -1;
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) stay(ends[1]);
    assert_int_equal(read(ends[0], &descriptor, sizeof descriptor), sizeof descriptor);
    const pst_page *seen = map_of(child, descriptor);
    assert_null(pst__page_fault(seen));
    assert_int_equal(kill(child, SIGSTOP), 0);
    assert_int_equal(waitpid(child, NULL, WUNTRACED), child);
    assert_string_equal(pst__page_fault(seen), "is stopped");
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_string_equal(pst__page_fault(seen), "has ended");
    assert_place(seen, "in the backward (step 3)");
    unmap(seen);
    (void)close(ends[0]);
    (void)close(ends[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_place_is_told_in_words),
        cmocka_unit_test(a_step_goes_to_where_the_next_one_begins),
        cmocka_unit_test(names_beyond_its_end_are_left_out),
        cmocka_unit_test(it_is_its_users_alone_and_leaves_nothing),
        cmocka_unit_test(others_find_it_with_its_job_while_a_runtime_has_it),
        cmocka_unit_test(what_a_process_wrote_stays_when_it_is_stopped_and_ended),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
