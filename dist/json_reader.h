/* A reader of JSON text that walks over it once, in a buffer that it may write to.
 *
 *     tn__json in = tn__json_begin(text, bytes);
 *     for (tn__json_enter(&in, '{'); tn__json_next(&in);) {
 *         const char *key = tn__json_key(&in);
 *         ... one of tn__json_string, _unsigned, _skip, or tn__json_enter ...
 *     }
 *     if (!tn__json_end(&in)) ... in.problem, at byte in.problem_at ...
 *
 * Strings are decoded where they are and end with a 0 there. What is not JSON (RFC 8259), is not
 * UTF-8, has a 0 in a string or is nested deeper than TN__JSON_DEPTH_MAX is a problem; after the
 * first one every call does nothing and gives 0, NULL or the end of the list.
 */
#ifndef TENURE_JSON_READER_H
#define TENURE_JSON_READER_H

#include <stddef.h>
#include <stdint.h>

enum { TN__JSON_DEPTH_MAX = 16 };

typedef struct tn__json {
    char *begin;
    char *at;
    char *end;
    const char *problem; /* NULL: none so far */
    size_t problem_at;
    int depth;
    char closing[TN__JSON_DEPTH_MAX]; /* of each list that is open */
    int is_first;                     /* no item of the innermost list has been read */
} tn__json;

tn__json tn__json_begin(char *text, size_t bytes);

/* Begins an object ('{') or an array ('['). */
void tn__json_enter(tn__json *in, char opening);

/* 1: there is one more item in the innermost list, to be read now; 0: it has ended, and the one
 * around it is the innermost again. */
int tn__json_next(tn__json *in);

const char *tn__json_key(tn__json *in); /* of the item of an object, before its value; NULL */
const char *tn__json_string(tn__json *in);
uint64_t tn__json_unsigned(tn__json *in); /* digits only, of at most 2^64 - 1 */
void tn__json_skip(tn__json *in);         /* any value */

/* Says what is wrong with the item just read, unless something was wrong before. */
void tn__json_refuse(tn__json *in, const char *problem);

/* Nothing but white space follows: 1, or there is a problem. */
int tn__json_end(tn__json *in);

/* 1: text is UTF-8, without overlong forms and surrogates. */
int tn__is_utf8(const char *text, size_t bytes);

#endif
