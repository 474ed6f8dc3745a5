/* The walk over JSON text: see json_reader.h.
 *
 * Invariant: begin <= at <= end; a decoded string is never longer than its text, so that it is
 * written behind what is still to be read.
 */
#include "json_reader.h"

#include <string.h>

tn__json tn__json_begin(char *text, size_t bytes) {
    return (tn__json){.begin = text, .at = text, .end = text + bytes};
}

void tn__json_refuse(tn__json *in, const char *problem) {
    if (in->problem) return;
    in->problem = problem;
    in->problem_at = (size_t)(in->at - in->begin);
}

static void skip_space(tn__json *in) {
    while (in->at < in->end && strchr(" \t\n\r", *in->at) && *in->at)
        in->at++;
}

static char peek(tn__json *in) {
    if (in->problem) return 0;
    skip_space(in);
    return in->at < in->end ? *in->at : 0;
}

/* ---- UTF-8 ----------------------------------------------------------------------------------- */

/* Bytes of the character that begins here; 0 if none does. */
static size_t character_bytes(const unsigned char *at, size_t left) {
    unsigned lead = at[0];
    unsigned least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    unsigned most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    size_t length = lead < 0x80   ? 1
                    : lead < 0xC2 ? 0
                    : lead < 0xE0 ? 2
                    : lead < 0xF0 ? 3
                    : lead < 0xF5 ? 4
                                  : 0;
    if (length <= 1) return length;
    if (length > left || at[1] < least || at[1] > most) return 0;
    for (size_t i = 2; i < length; i++) {
        if ((at[i] & 0xC0) != 0x80) return 0;
    }
    return length;
}

int tn__is_utf8(const char *text, size_t bytes) {
    while (bytes) {
        size_t step = character_bytes((const unsigned char *)text, bytes);
        if (!step) return 0;
        text += step;
        bytes -= step;
    }
    return 1;
}

static size_t encode(unsigned code, char *out) {
    if (code < 0x80) return out[0] = (char)code, 1;
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, code >>= 6)
        out[i] = (char)(0x80 | (code & 0x3F));
    out[0] = (char)((0xF00 >> length & 0xFF) | code);
    return length;
}

/* ---- strings --------------------------------------------------------------------------------- */

static int hex_digit(char digit) {
    static const char digits[] = "0123456789abcdef";
    char lower = (char)(digit >= 'A' && digit <= 'F' ? digit + ('a' - 'A') : digit);
    const char *found = lower ? strchr(digits, lower) : NULL;
    return found ? (int)(found - digits) : -1;
}

/* The four digits of \u; -1 if they are not there. */
static int read_unit(tn__json *in) {
    int unit = 0;
    if (in->end - in->at < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int digit = hex_digit(in->at[i]);
        if (digit < 0) return -1;
        unit = unit * 16 + digit;
    }
    in->at += 4;
    return unit;
}

static size_t decode_unit(tn__json *in, char *out) {
    int unit = read_unit(in), low = 0;
    if (unit < 0) return tn__json_refuse(in, "\\u without four hexadecimal digits"), 0;
    if (unit == 0) return tn__json_refuse(in, "a 0 in a string"), 0;
    if (unit < 0xD800 || unit > 0xDFFF) return encode((unsigned)unit, out);
    if (unit < 0xDC00 && in->end - in->at >= 6 && in->at[0] == '\\' && in->at[1] == 'u') {
        in->at += 2;
        low = read_unit(in);
    }
    if (low < 0xDC00 || low > 0xDFFF) return tn__json_refuse(in, "half a surrogate pair"), 0;
    return encode(0x10000 + ((unsigned)(unit - 0xD800) << 10) + (unsigned)(low - 0xDC00), out);
}

/* Behind the backslash. */
static size_t decode_escape(tn__json *in, char *out) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    char name = in->at < in->end ? *in->at++ : 0;
    const char *found = name ? strchr(names, name) : NULL;
    if (name == 'u') return decode_unit(in, out);
    if (!found) return tn__json_refuse(in, "an escape that JSON does not have"), 0;
    *out = values[found - names];
    return 1;
}

/* Moves one character as it stands. */
static size_t move_character(tn__json *in, char *out) {
    size_t left = (size_t)(in->end - in->at);
    size_t bytes = character_bytes((const unsigned char *)in->at, left);
    if ((unsigned char)*in->at < 0x20)
        return tn__json_refuse(in, "a control character in a string"), 0;
    if (!bytes) return tn__json_refuse(in, "bytes that are not UTF-8"), 0;
    memmove(out, in->at, bytes);
    in->at += bytes;
    return bytes;
}

const char *tn__json_string(tn__json *in) {
    if (peek(in) != '"') return tn__json_refuse(in, "no string where one has to be"), NULL;
    char *text = ++in->at, *out = text;
    while (!in->problem) {
        if (in->at == in->end) {
            tn__json_refuse(in, "a string without an end");
        } else if (*in->at == '"') {
            in->at++;
            *out = 0;
            return text;
        } else if (*in->at == '\\') {
            in->at++;
            out += decode_escape(in, out);
        } else {
            out += move_character(in, out);
        }
    }
    return NULL;
}

/* ---- numbers and words ----------------------------------------------------------------------- */

static int is_digit(const tn__json *in) {
    return in->at < in->end && *in->at >= '0' && *in->at <= '9';
}

uint64_t tn__json_unsigned(tn__json *in) {
    uint64_t value = 0;
    if (peek(in) < '0' || !is_digit(in))
        return tn__json_refuse(in, "no whole number where one has to be"), 0;
    if (*in->at == '0') {
        in->at++;
    } else {
        for (; is_digit(in); in->at++) {
            if (__builtin_mul_overflow(value, (uint64_t)10, &value) ||
                __builtin_add_overflow(value, (uint64_t)(*in->at - '0'), &value))
                return tn__json_refuse(in, "a number that is too large"), 0;
        }
    }
    if (in->at < in->end && (is_digit(in) || strchr(".eE", *in->at)) && *in->at)
        return tn__json_refuse(in, "no whole number where one has to be"), 0;
    return value;
}

static void skip_digits(tn__json *in) {
    if (!is_digit(in)) tn__json_refuse(in, "a number without digits");
    while (is_digit(in))
        in->at++;
}

static int skip_one_of(tn__json *in, const char *set) {
    int has_one = in->at < in->end && *in->at && strchr(set, *in->at);
    if (has_one) in->at++;
    return has_one;
}

static void skip_number(tn__json *in) {
    (void)skip_one_of(in, "-");
    if (!skip_one_of(in, "0")) skip_digits(in);
    if (skip_one_of(in, ".")) skip_digits(in);
    if (skip_one_of(in, "eE")) {
        (void)skip_one_of(in, "+-");
        skip_digits(in);
    }
}

static void skip_word(tn__json *in, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(in->end - in->at) < length || memcmp(in->at, word, length) != 0)
        tn__json_refuse(in, "no value where one has to be");
    else
        in->at += length;
}

static void skip_scalar(tn__json *in) {
    switch (peek(in)) {
    case '"': (void)tn__json_string(in); break;
    case 't': skip_word(in, "true"); break;
    case 'f': skip_word(in, "false"); break;
    case 'n': skip_word(in, "null"); break;
    default: skip_number(in); break;
    }
}

/* ---- lists ----------------------------------------------------------------------------------- */

void tn__json_enter(tn__json *in, char opening) {
    if (peek(in) != opening) {
        tn__json_refuse(in, opening == '{' ? "no object where one has to be"
                                           : "no array where one has to be");
        return;
    }
    if (in->depth == TN__JSON_DEPTH_MAX) {
        tn__json_refuse(in, "lists that are nested too deep");
        return;
    }
    in->at++;
    in->closing[in->depth++] = opening == '{' ? '}' : ']';
    in->is_first = 1;
}

int tn__json_next(tn__json *in) {
    char next = peek(in);
    if (in->problem) return 0;
    if (next == in->closing[in->depth - 1]) {
        in->at++;
        in->depth--;
        in->is_first = 0;
        return 0;
    }
    if (!in->is_first) {
        if (next != ',') return tn__json_refuse(in, "a list without an end"), 0;
        in->at++;
    }
    in->is_first = 0;
    return 1;
}

const char *tn__json_key(tn__json *in) {
    const char *key = tn__json_string(in);
    if (peek(in) != ':') return tn__json_refuse(in, "a key without a colon"), NULL;
    in->at++;
    return key;
}

void tn__json_skip(tn__json *in) {
    int outside = in->depth;
    do {
        char next = peek(in);
        if (next == '{' || next == '[')
            tn__json_enter(in, next);
        else
            skip_scalar(in);
        while (in->depth > outside && !in->problem && !tn__json_next(in))
            continue;
        if (in->depth > outside && in->closing[in->depth - 1] == '}') (void)tn__json_key(in);
    } while (in->depth > outside && !in->problem);
}

int tn__json_end(tn__json *in) {
    if (peek(in) || in->at < in->end) tn__json_refuse(in, "something behind the end");
    return !in->problem;
}
