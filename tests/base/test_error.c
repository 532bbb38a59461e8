#include "base/error.h"

#include "tests/cmocka_all.h"

#include <pthread.h>
#include <string.h>

typedef struct heard {
    int count;
    pst_log_level level;
    char text[PST__ERROR_BYTES];
} heard;

static void hear(void *context, pst_log_level level, const char *text) {
    heard *heard = context;
    ++heard->count;
    heard->level = level;
    strcpy(heard->text, text);
}

static void there_is_no_text_before_an_error(void **state) {
    (void)state;
    pst__error error;
    char buffer[8] = "before";
    pst__error_init(&error, NULL, NULL);
    assert_int_equal(pst__error_get(&error, buffer, sizeof buffer), 0);
    assert_string_equal(buffer, "");
}

static void failing_formats_the_text_and_returns_the_status(void **state) {
    (void)state;
    pst__error error;
    char buffer[64];
    pst__error_init(&error, NULL, NULL);
    assert_int_equal(pst__fail(&error, PST_EBUSY, "lane %s: task %d", "gather", 7), PST_EBUSY);
    assert_int_equal(pst__error_get(&error, buffer, sizeof buffer), strlen("lane gather: task 7"));
    assert_string_equal(buffer, "lane gather: task 7");
}

static void the_latest_text_stays(void **state) {
    (void)state;
    pst__error error;
    char buffer[64];
    pst__error_init(&error, NULL, NULL);
    (void)pst__fail(&error, PST_EINVAL, "a long first text");
    (void)pst__fail(&error, PST_EINVAL, "second");
    (void)pst__error_get(&error, buffer, sizeof buffer);
    assert_string_equal(buffer, "second");
}

static void a_small_buffer_cuts_the_text_and_learns_its_length(void **state) {
    (void)state;
    pst__error error;
    char buffer[5] = "####";
    pst__error_init(&error, NULL, NULL);
    (void)pst__fail(&error, PST_EINVAL, "0123456789");
    assert_int_equal(pst__error_get(&error, buffer, 4), 10);
    assert_memory_equal(buffer, "012\0", 5);
}

static void no_buffer_yields_the_length_alone(void **state) {
    (void)state;
    pst__error error;
    pst__error_init(&error, NULL, NULL);
    (void)pst__fail(&error, PST_EINVAL, "0123456789");
    assert_int_equal(pst__error_get(&error, NULL, 0), 10);
}

static void a_text_too_long_is_cut(void **state) {
    (void)state;
    pst__error error;
    char longer[2 * PST__ERROR_BYTES], buffer[2 * PST__ERROR_BYTES];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    pst__error_init(&error, NULL, NULL);
    (void)pst__fail(&error, PST_EINVAL, "%s", longer);
    assert_int_equal(pst__error_get(&error, buffer, sizeof buffer), PST__ERROR_BYTES - 1);
    assert_int_equal(strlen(buffer), PST__ERROR_BYTES - 1);
}

static void an_error_is_logged_as_one(void **state) {
    (void)state;
    heard heard = {.level = PST_LOG_INFO};
    pst__error error;
    pst__error_init(&error, hear, &heard);
    (void)pst__fail(&error, PST_EINVAL, "task %d", 3);
    assert_int_equal(heard.count, 1);
    assert_int_equal(heard.level, PST_LOG_ERROR);
    assert_string_equal(heard.text, "task 3");
}

static void a_log_line_is_no_error(void **state) {
    (void)state;
    heard heard = {0};
    pst__error error;
    pst__error_init(&error, hear, &heard);
    pst__log(&error, PST_LOG_WARNING, "late %s", "launch");
    assert_int_equal(heard.level, PST_LOG_WARNING);
    assert_string_equal(heard.text, "late launch");
    assert_int_equal(pst__error_get(&error, NULL, 0), 0);
}

static void logging_without_a_hook_does_nothing(void **state) {
    (void)state;
    pst__error error;
    pst__error_init(&error, NULL, NULL);
    pst__log(&error, PST_LOG_ERROR, "unheard");
    assert_int_equal(pst__error_get(&error, NULL, 0), 0);
}

enum { THREADS = 4, TURNS = 2000, LETTERS = 100 };

typedef struct writer {
    pthread_t thread;
    pst__error *error;
    char letter;
} writer;

static void *fail_often(void *argument) {
    writer *writer = argument;
    char text[LETTERS + 1];
    memset(text, writer->letter, LETTERS);
    text[LETTERS] = '\0';
    for (int turn = 0; turn < TURNS; ++turn)
        (void)pst__fail(writer->error, PST_EINVAL, "%s", text);
    return NULL;
}

static int is_one_letter(const char *text, size_t length) {
    for (size_t i = 1; i < length; ++i)
        if (text[i] != text[0]) return 0;
    return 1;
}

static void texts_of_several_threads_never_mix(void **state) {
    (void)state;
    pst__error error;
    writer writers[THREADS];
    pst__error_init(&error, NULL, NULL);
    for (int i = 0; i < THREADS; ++i) {
        writers[i] = (writer){.error = &error, .letter = (char)('a' + i)};
        assert_int_equal(pthread_create(&writers[i].thread, NULL, fail_often, &writers[i]), 0);
    }
    int mixed = 0;
    for (int turn = 0; turn < TURNS; ++turn) {
        char buffer[PST__ERROR_BYTES];
        size_t length = pst__error_get(&error, buffer, sizeof buffer);
        mixed += (length != 0 && length != LETTERS) || !is_one_letter(buffer, length);
    }
    for (int i = 0; i < THREADS; ++i)
        (void)pthread_join(writers[i].thread, NULL);
    assert_int_equal(mixed, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(there_is_no_text_before_an_error),
        cmocka_unit_test(failing_formats_the_text_and_returns_the_status),
        cmocka_unit_test(the_latest_text_stays),
        cmocka_unit_test(a_small_buffer_cuts_the_text_and_learns_its_length),
        cmocka_unit_test(no_buffer_yields_the_length_alone),
        cmocka_unit_test(a_text_too_long_is_cut),
        cmocka_unit_test(an_error_is_logged_as_one),
        cmocka_unit_test(a_log_line_is_no_error),
        cmocka_unit_test(logging_without_a_hook_does_nothing),
        cmocka_unit_test(texts_of_several_threads_never_mix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
