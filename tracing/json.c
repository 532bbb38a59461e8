#include "tracing/json.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define BUFFER_BYTES 65536u

pst_status pst__json_open(pst__json *json, const pst__heap *heap, const char *path) {
    *json = (pst__json){.heap = heap, .descriptor = -1};
    json->buffer = pst__heap_alloc(heap, BUFFER_BYTES);
    if (json->buffer == NULL) return PST_ENOMEM;
    json->descriptor = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (json->descriptor >= 0) return PST_OK;
    json->error = errno;
    pst__heap_free(heap, json->buffer, BUFFER_BYTES);
    return PST_EIO;
}

static void flush(pst__json *json) {
    size_t written = 0;
    while (written < json->used && json->error == 0) {
        ssize_t result = write(json->descriptor, json->buffer + written, json->used - written);
        if (result >= 0)
            written += (size_t)result;
        else if (errno != EINTR)
            json->error = errno;
    }
    json->used = 0;
}

pst_status pst__json_close(pst__json *json) {
    flush(json);
    if (close(json->descriptor) != 0 && json->error == 0) json->error = errno;
    pst__heap_free(json->heap, json->buffer, BUFFER_BYTES);
    return json->error == 0 ? PST_OK : PST_EIO;
}

static void put(pst__json *json, const char *text, size_t bytes) {
    while (bytes > 0) {
        if (json->used == BUFFER_BYTES) flush(json);
        size_t room = BUFFER_BYTES - json->used;
        size_t part = bytes < room ? bytes : room;
        memcpy(json->buffer + json->used, text, part);
        json->used += part;
        text += part;
        bytes -= part;
    }
}

void pst__json_raw(pst__json *json, const char *text) {
    put(json, text, strlen(text));
}

/* Writes at least `width` digits that end just before `end`; returns where they begin. */
static char *digits(char *end, uint64_t value, int width) {
    for (; value != 0 || width > 0; value /= 10, --width)
        *--end = (char)('0' + value % 10);
    return end;
}

void pst__json_unsigned(pst__json *json, uint64_t value) {
    char text[20];
    char *end = text + sizeof text;
    char *begin = digits(end, value, 1);
    put(json, begin, (size_t)(end - begin));
}

void pst__json_signed(pst__json *json, int64_t value) {
    if (value < 0) put(json, "-", 1);
    pst__json_unsigned(json, value < 0 ? 0 - (uint64_t)value : (uint64_t)value);
}

void pst__json_microseconds(pst__json *json, uint64_t nanoseconds) {
    char text[24];
    char *end = text + sizeof text;
    char *fraction = digits(end, nanoseconds % 1000, 3);
    *--fraction = '.';
    char *begin = digits(fraction, nanoseconds / 1000, 1);
    put(json, begin, (size_t)(end - begin));
}

/* The forms of UTF-8, by first byte: how many bytes follow, and the range of the first of them
 * (which rules out overlong forms, surrogates and values beyond U+10FFFF). */
static const struct {
    unsigned char first, last, follow, low, high;
} utf8_forms[] = {
    {0x00, 0x7f, 0, 0x00, 0x00}, {0xc2, 0xdf, 1, 0x80, 0xbf}, {0xe0, 0xe0, 2, 0xa0, 0xbf},
    {0xe1, 0xec, 2, 0x80, 0xbf}, {0xed, 0xed, 2, 0x80, 0x9f}, {0xee, 0xef, 2, 0x80, 0xbf},
    {0xf0, 0xf0, 3, 0x90, 0xbf}, {0xf1, 0xf3, 3, 0x80, 0xbf}, {0xf4, 0xf4, 3, 0x80, 0x8f},
};

static int form_matches(size_t form, const unsigned char *text) {
    if (text[0] < utf8_forms[form].first || text[0] > utf8_forms[form].last) return 0;
    for (unsigned i = 1; i <= utf8_forms[form].follow; ++i) {
        unsigned char low = i == 1 ? utf8_forms[form].low : 0x80;
        unsigned char high = i == 1 ? utf8_forms[form].high : 0xbf;
        if (text[i] < low || text[i] > high) return 0; /* the final NUL, too */
    }
    return 1;
}

/* Bytes of the character that begins here; 0 if it is not UTF-8. */
static size_t character_bytes(const unsigned char *text) {
    for (size_t form = 0; form < sizeof utf8_forms / sizeof utf8_forms[0]; ++form)
        if (form_matches(form, text)) return utf8_forms[form].follow + 1u;
    return 0;
}

static void put_control(pst__json *json, unsigned char byte) {
    static const char hex[] = "0123456789abcdef";
    char text[6] = {'\\', 'u', '0', '0', hex[byte >> 4], hex[byte & 15]};
    put(json, text, sizeof text);
}

/* Returns how many bytes of `text` it has dealt with. */
static size_t put_character(pst__json *json, const unsigned char *text) {
    size_t bytes = character_bytes(text);
    if (bytes == 0) {
        pst__json_raw(json, "\\ufffd");
        return 1;
    }
    if (*text < 0x20) {
        put_control(json, *text);
        return 1;
    }
    if (*text == '"' || *text == '\\') put(json, "\\", 1);
    put(json, (const char *)text, bytes);
    return bytes;
}

void pst__json_string(pst__json *json, const char *text) {
    const unsigned char *at = (const unsigned char *)(text == NULL ? "" : text);
    put(json, "\"", 1);
    while (*at != '\0')
        at += put_character(json, at);
    put(json, "\"", 1);
}
