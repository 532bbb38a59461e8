/* Which sanitizer a test is compiled for. */
#ifndef PST_TESTS_SANITIZER_H
#define PST_TESTS_SANITIZER_H

#if defined(__SANITIZE_THREAD__)
#define UNDER_THREAD_SANITIZER 1
#elif defined(__has_feature)
#define UNDER_THREAD_SANITIZER __has_feature(thread_sanitizer)
#else
#define UNDER_THREAD_SANITIZER 0
#endif

#if defined(__SANITIZE_ADDRESS__)
#define UNDER_SANITIZER 1
#elif defined(__has_feature)
#define UNDER_SANITIZER (UNDER_THREAD_SANITIZER || __has_feature(address_sanitizer))
#else
#define UNDER_SANITIZER UNDER_THREAD_SANITIZER
#endif

#endif
