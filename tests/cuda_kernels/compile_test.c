/* NVRTC compiles the kernels without a GPU, and what it made is kept on disk. */
#include "../cmocka_all.h"

#include "sched/cuda/compile.h"

#include <dlfcn.h>
#include <ftw.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct {
    pst__heap heap;
    pst__error error;
    char root[64];   /* of all files of a test */
    char folder[80]; /* the cache, in `root` */
    pst__cuda_image image;
    int cached;
} it;

static int remove_one(const char *path, const struct stat *about, int kind, struct FTW *place) {
    (void)about, (void)kind, (void)place;
    return remove(path);
}

static int begin(void **state) {
    (void)state;
    (void)snprintf(it.root, sizeof it.root, "/tmp/penstock-compile-XXXXXX");
    if (mkdtemp(it.root) == NULL) return -1;
    (void)snprintf(it.folder, sizeof it.folder, "%s/new/cache", it.root);
    pst__error_init(&it.error, NULL, NULL);
    return pst__heap_init(&it.heap, NULL);
}

static void drop(void) {
    pst__heap_free(&it.heap, it.image.data, it.image.bytes);
    it.image.data = NULL;
}

static int end(void **state) {
    (void)state;
    drop();
    return nftw(it.root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static pst_status compile_for(int major, const char *nvrtc, const char *cache) {
    const pst__cuda_compile_options options = {
        .nvrtc = nvrtc, .cache = cache, .major = major, .minor = 0, .newest_cuda = 13000};
    drop();
    return pst__cuda_compile(&it.heap, &options, &it.image, &it.cached, &it.error);
}

/* ---- the compiler ----------------------------------------------------------------------- */

static int mentions(const char *name) {
    const size_t length = strlen(name);
    for (size_t i = 0; i + length < it.image.bytes; i++)
        if (memcmp((const char *)it.image.data + i, name, length + 1) == 0) return 1;
    return 0;
}

static void the_kernels_compile_for_each_architecture_without_a_cache_too(void **state) {
    static const int majors[] = {8, 9, 10};
    (void)state;
    for (size_t i = 0; i < sizeof majors / sizeof majors[0]; i++) {
        if (compile_for(majors[i], NULL, i == 0 ? "" : "/dev/null/cache") != PST_OK)
            fail_msg("%s", it.error.text);
        assert_int_equal(it.cached, 0);
        assert_memory_equal(it.image.data, "\177ELF", 4);
        assert_true(mentions("pst_cast_scale_copy"));
        assert_true(mentions("pst_cast_scale_copy_many"));
        assert_true(mentions("pst_sum"));
        assert_true(mentions("pst_fill"));
        assert_true(mentions("pst_copy_rows"));
    }
}

static void what_the_compiler_says_is_the_error(void **state) {
    (void)state;
    assert_int_equal(compile_for(1, NULL, it.folder), PST_EDEVICE);
    assert_null(it.image.data);
    assert_non_null(strstr(it.error.text, "nvrtcCompileProgram"));
    assert_non_null(strstr(it.error.text, "gpu-architecture"));
    assert_int_not_equal(access(it.folder, F_OK), 0);
}

static void a_compiler_that_is_not_there_is_named(void **state) {
    (void)state;
    const pst__cuda_compile_options options = {
        .nvrtc = "/nowhere/libnvrtc.so", .cache = "", .major = 9, .newest_cuda = 13000};
    assert_int_equal(pst__cuda_compile(&it.heap, &options, &it.image, NULL, &it.error),
                     PST_EUNSUPPORTED);
    assert_non_null(strstr(it.error.text, "/nowhere/libnvrtc.so"));
}

static void a_library_that_is_no_compiler_is_named(void **state) {
    (void)state;
    const pst__cuda_compile_options options = {
        .nvrtc = "libm.so.6", .cache = "", .major = 9, .newest_cuda = 13000};
    assert_int_equal(pst__cuda_compile(&it.heap, &options, &it.image, NULL, &it.error),
                     PST_EUNSUPPORTED);
    assert_non_null(strstr(it.error.text, "libm.so.6 has no nvrtcVersion"));
}

static void a_compiler_newer_than_the_driver_is_not_looked_for(void **state) {
    (void)state;
    pst__nvrtc nvrtc;
    assert_int_equal(pst__nvrtc_open(&nvrtc, NULL, 11, &it.error), PST_EUNSUPPORTED);
    assert_non_null(strstr(it.error.text, "libnvrtc.so.11"));
}

static void run_command(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void run_command(const char *format, ...) {
    char command[1024];
    va_list arguments;
    va_start(arguments, format);
    assert_in_range(vsnprintf(command, sizeof command, format, arguments), 1, sizeof command - 1);
    va_end(arguments);
    assert_int_equal(system(command), 0);
}

/* Torch's libraries and NVRTC's as their wheels lie; both are the fake driver, which is a compiler
 * too. */
static void the_compiler_that_came_with_torch_is_found(void **state) {
    (void)state;
    char path[128];
    pst__nvrtc nvrtc;
    run_command("mkdir -p %s/torch/lib %s/nvidia/cu13/lib", it.root, it.root);
    run_command("cp %s %s/torch/lib/libtorch_cpu.so", FAKE_CUDA_PATH, it.root);
    run_command("cp %s %s/nvidia/cu13/lib/libnvrtc.so.13", FAKE_CUDA_PATH, it.root);
    (void)snprintf(path, sizeof path, "%s/torch/lib/libtorch_cpu.so", it.root);
    void *torch = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(torch);
    assert_int_equal(pst__nvrtc_open(&nvrtc, NULL, 13, &it.error), PST_OK);
    (void)snprintf(path, sizeof path, "%s/torch/lib/../../nvidia/cu13/lib/libnvrtc.so.13", it.root);
    assert_string_equal(nvrtc.path, path);
    pst__nvrtc_close(&nvrtc);
    assert_int_equal(dlclose(torch), 0);
}

/* ---- the cache -------------------------------------------------------------------------- */

static void find(pst__cuda_cache *cache) {
    pst__cuda_cache_find(cache, it.folder, "a key");
}

static void write_text(const char *text) {
    pst__cuda_cache cache;
    const pst__cuda_image image = {(void *)(uintptr_t)text, strlen(text)};
    find(&cache);
    assert_int_equal(pst__cuda_cache_write(&cache, &image), PST_OK);
}

static pst_status read_key(const char *key) {
    pst__cuda_cache cache;
    pst__cuda_cache_find(&cache, it.folder, key);
    drop();
    return pst__cuda_cache_read(&cache, &it.heap, &it.image);
}

static void what_was_written_is_read(void **state) {
    (void)state;
    assert_int_equal(read_key("a key"), PST_EIO);
    write_text("machine code");
    assert_int_equal(read_key("a key"), PST_OK);
    assert_int_equal(it.image.bytes, 12);
    assert_memory_equal(it.image.data, "machine code", 12);
    assert_int_equal(read_key("another key"), PST_EIO);
}

static void another_key_in_its_place_is_not_believed(void **state) {
    (void)state;
    pst__cuda_cache one, other;
    write_text("machine code");
    find(&one);
    pst__cuda_cache_find(&other, it.folder, "another key");
    assert_int_equal(rename(one.path, other.path), 0);
    assert_int_equal(read_key("another key"), PST_EIO);
}

static void flip_byte(const char *path, long at) {
    FILE *file = fopen(path, "r+");
    assert_non_null(file);
    assert_int_equal(fseek(file, at, SEEK_SET), 0);
    const int byte = fgetc(file);
    assert_int_equal(fseek(file, at, SEEK_SET), 0);
    assert_int_not_equal(fputc(byte ^ 4, file), EOF);
    assert_int_equal(fclose(file), 0);
}

static void no_file_with_a_wrong_byte_is_believed(void **state) {
    (void)state;
    pst__cuda_cache cache;
    find(&cache);
    for (long at = 0; at < 32 + 12; at++) {
        write_text("machine code");
        flip_byte(cache.path, at);
        assert_int_equal(read_key("a key"), PST_EIO);
    }
}

static void no_file_that_is_cut_is_believed(void **state) {
    (void)state;
    pst__cuda_cache cache;
    find(&cache);
    for (off_t bytes = 0; bytes < 32 + 12; bytes++) {
        write_text("machine code");
        assert_int_equal(truncate(cache.path, bytes), 0);
        assert_int_equal(read_key("a key"), PST_EIO);
    }
    write_text("machine code");
    assert_int_equal(read_key("a key"), PST_OK);
}

static void what_others_could_have_written_is_not_believed(void **state) {
    (void)state;
    pst__cuda_cache cache;
    find(&cache);
    write_text("machine code");
    assert_int_equal(chmod(cache.path, 0622), 0);
    assert_int_equal(read_key("a key"), PST_EIO);
    assert_int_equal(chmod(cache.path, 0600), 0);
    assert_int_equal(read_key("a key"), PST_OK);
    if (geteuid() == 0) {
        assert_int_equal(chown(cache.path, 65534, 65534), 0);
        assert_int_equal(read_key("a key"), PST_EIO);
    } else {
        print_message("not shown: only root can give a file to another user\n");
    }
    assert_int_equal(unlink(cache.path), 0);
    assert_int_equal(mkfifo(cache.path, 0600), 0);
    assert_int_equal(read_key("a key"), PST_EIO); /* at once */
    write_text("machine code");
    assert_int_equal(read_key("a key"), PST_OK);
}

static size_t files_in(const char *folder) {
    char command[128];
    (void)snprintf(command, sizeof command, "ls -A %s | wc -l", folder);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t count = 0;
    assert_int_equal(fscanf(pipe, "%zu", &count), 1);
    assert_int_equal(pclose(pipe), 0);
    return count;
}

static void a_folder_that_cannot_be_written_is_no_folder(void **state) {
    (void)state;
    pst__cuda_cache cache;
    const pst__cuda_image image = {(void *)(uintptr_t) "x", 1};
    pst__cuda_cache_find(&cache, "/dev/null/cache", "a key");
    assert_int_equal(pst__cuda_cache_write(&cache, &image), PST_EIO);
    /* The last step fails: a folder lies where the file should. What it was to be is removed. */
    find(&cache);
    run_command("mkdir -p %s/full", cache.path);
    assert_int_equal(pst__cuda_cache_write(&cache, &image), PST_EIO);
    assert_int_equal(files_in(it.folder), 1);
}

static void the_folder_is_the_users(void **state) {
    (void)state;
    pst__cuda_cache cache;
    char expected[128];
    assert_int_equal(setenv("XDG_CACHE_HOME", it.root, 1), 0);
    pst__cuda_cache_find(&cache, NULL, "a key");
    (void)snprintf(expected, sizeof expected, "%s/penstock/kernels-", it.root);
    assert_memory_equal(cache.path, expected, strlen(expected));
    assert_int_equal(setenv("XDG_CACHE_HOME", "relative", 1), 0);
    assert_int_equal(setenv("HOME", it.root, 1), 0);
    pst__cuda_cache_find(&cache, NULL, "a key");
    (void)snprintf(expected, sizeof expected, "%s/.cache/penstock/kernels-", it.root);
    assert_memory_equal(cache.path, expected, strlen(expected));
    assert_int_equal(unsetenv("HOME"), 0);
    pst__cuda_cache_find(&cache, NULL, "a key");
    assert_string_equal(cache.path, "");
    assert_int_equal(pst__cuda_cache_write(&cache, &(pst__cuda_image){expected, 1}), PST_EIO);
}

/* ---- both ------------------------------------------------------------------------------- */

/* This program again, as `PROGRAM FOLDER`: compiles twice, the second time from the cache, by the
 * fake compiler, which takes no time. Its status says whether all went well. */
static int compile_in_process(char *folder) {
    pst__error_init(&it.error, NULL, NULL);
    (void)snprintf(it.folder, sizeof it.folder, "%s", folder);
    int bad = pst__heap_init(&it.heap, NULL) != PST_OK;
    for (int i = 0; i < 2 && !bad; i++)
        bad = compile_for(9, FAKE_CUDA_PATH, it.folder) != PST_OK || it.cached < i;
    drop();
    return bad;
}

static pid_t start_process(void) {
    static char program[] = "/proc/self/exe";
    char *const arguments[] = {program, it.folder, NULL};
    pid_t process;
    assert_int_equal(posix_spawn(&process, program, NULL, NULL, arguments, environ), 0);
    return process;
}

static void two_processes_may_compile_at_once_and_the_cache_has_it_then(void **state) {
    (void)state;
    const pid_t processes[2] = {start_process(), start_process()};
    for (int i = 0; i < 2; i++) {
        int status = -1;
        assert_int_equal(waitpid(processes[i], &status, 0), processes[i]);
        assert_int_equal(status, 0);
    }
    assert_int_equal(files_in(it.folder), 1);
    assert_int_equal(compile_for(9, FAKE_CUDA_PATH, it.folder), PST_OK);
    assert_int_equal(it.cached, 1);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, begin, end)

static int run_compiler(void) {
    const struct CMUnitTest tests[] = {
        CASE(the_kernels_compile_for_each_architecture_without_a_cache_too),
        CASE(what_the_compiler_says_is_the_error),
    };
    pst__nvrtc nvrtc;
    pst__error_init(&it.error, NULL, NULL);
    if (pst__nvrtc_open(&nvrtc, getenv("PST_NVRTC"), 13, &it.error) != PST_OK) {
        printf("skipped: what needs the compiler: %s\n", it.error.text);
        return 0;
    }
    printf("%s, %d.%d\n", nvrtc.path, nvrtc.major, nvrtc.minor);
    pst__nvrtc_close(&nvrtc);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int count, char **arguments) {
    const struct CMUnitTest tests[] = {
        CASE(a_compiler_that_is_not_there_is_named),
        CASE(a_library_that_is_no_compiler_is_named),
        CASE(a_compiler_newer_than_the_driver_is_not_looked_for),
        CASE(the_compiler_that_came_with_torch_is_found),
        CASE(what_was_written_is_read),
        CASE(another_key_in_its_place_is_not_believed),
        CASE(no_file_with_a_wrong_byte_is_believed),
        CASE(no_file_that_is_cut_is_believed),
        CASE(what_others_could_have_written_is_not_believed),
        CASE(a_folder_that_cannot_be_written_is_no_folder),
        CASE(the_folder_is_the_users),
        CASE(two_processes_may_compile_at_once_and_the_cache_has_it_then),
    };
    if (count == 2) return compile_in_process(arguments[1]);
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return failed + run_compiler();
}
