/* The stack machine of a pickle: see pickle_reader.h.
 *
 * Values lie in one array, in the order in which they are made, and are named by their numbers:
 * the stack, the memo, lists and dicts hold numbers. `marks` are heights of the stack.
 *
 *     values   0: {}   1: "a"   2: 7          stack   0            {"a": 7}
 *
 * Invariants: a mark is at most the height of the stack and not below the mark before it; nothing
 * below the last mark is popped except by the instructions that take the mark; each number is
 * below the count of values.
 */
#include "pickle_reader.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "id_table.h"

enum { FIRST_VALUES = 1024, FIRST_ITEMS = 4, PROTOCOL_MAX = 5 };

typedef struct number_stack {
    uint32_t *at;
    size_t count;
    size_t capacity;
} number_stack;

struct pickle {
    const unsigned char *bytes;
    size_t length;
    size_t at;          /* the next byte */
    size_t instruction; /* where the present one begins */
    char *error;
    int is_done;
    pickle_value *values;
    uint32_t value_count;
    uint32_t value_capacity;
    uint32_t root;
    number_stack stack;
    number_stack marks;
    id_table memo;
};

/* ---- messages -------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static pickle_result fail(pickle *self, const char *format,
                                                                ...) {
    va_list arguments;
    int used =
        snprintf(self->error, PICKLE_ERROR_BYTES, "byte %zu of the pickle: ", self->instruction);
    va_start(arguments, format);
    vsnprintf(self->error + used, PICKLE_ERROR_BYTES - (size_t)used, format, arguments);
    va_end(arguments);
    return PICKLE_BAD_INPUT;
}

static pickle_result no_memory(pickle *self) {
    snprintf(self->error, PICKLE_ERROR_BYTES, "out of host memory");
    return PICKLE_NO_MEMORY;
}

static pickle_result fail_cut(pickle *self) {
    return fail(self, "the pickle ends early; was the file cut short while it was copied?");
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static size_t bytes_left(const pickle *self) { return self->length - self->at; }

/* A little-endian number of 1 to 8 bytes. */
static pickle_result take_number(pickle *self, size_t bytes, uint64_t *out) {
    uint64_t number = 0;
    if (bytes_left(self) < bytes) return fail_cut(self);
    for (size_t i = 0; i < bytes; i++)
        number |= (uint64_t)self->bytes[self->at + i] << (8 * i);
    self->at += bytes;
    *out = number;
    return PICKLE_READ;
}

/* ---- values ---------------------------------------------------------------------------------- */

static int push_number(number_stack *stack, uint32_t number) {
    if (stack->count == stack->capacity) {
        size_t capacity = stack->capacity ? 2 * stack->capacity : FIRST_VALUES;
        uint32_t *at = realloc(stack->at, capacity * sizeof *at);
        if (!at) return 0;
        stack->at = at;
        stack->capacity = capacity;
    }
    stack->at[stack->count++] = number;
    return 1;
}

static pickle_result push_known(pickle *self, uint32_t number) {
    return push_number(&self->stack, number) ? PICKLE_READ : no_memory(self);
}

static pickle_result push_value(pickle *self, pickle_value value) {
    if (self->value_count == self->value_capacity) {
        uint32_t capacity = self->value_capacity ? 2 * self->value_capacity : FIRST_VALUES;
        pickle_value *values = NULL;
        if (self->value_capacity < UINT32_MAX / 2)
            values = realloc(self->values, capacity * sizeof *values);
        if (!values) return no_memory(self);
        self->values = values;
        self->value_capacity = capacity;
    }
    self->values[self->value_count] = value;
    return push_known(self, self->value_count++);
}

static pickle_result push_integer(pickle *self, pickle_kind kind, int64_t integer) {
    return push_value(self, (pickle_value){.kind = kind, .of.integer = integer});
}

static pickle_result push_text(pickle *self, size_t bytes_of_length) {
    uint64_t length = 0;
    pickle_result result = take_number(self, bytes_of_length, &length);
    pickle_value value = {.kind = PICKLE_TEXT};
    if (result != PICKLE_READ) return result;
    if (length > bytes_left(self) || length > UINT32_MAX) return fail_cut(self);
    value.count = (uint32_t)length;
    value.of.text = (const char *)self->bytes + self->at;
    self->at += length;
    return push_value(self, value);
}

/* A whole number of any length, least byte first; those of more than 64 bits are refused. */
static pickle_result push_long(pickle *self, size_t bytes_of_length) {
    uint64_t length = 0;
    uint64_t number = 0;
    pickle_result result = take_number(self, bytes_of_length, &length);
    if (result != PICKLE_READ) return result;
    if (length > bytes_left(self)) return fail_cut(self);
    /* 2^63 to 2^64 need a ninth byte, which is 0. */
    if (length > 9 || (length == 9 && self->bytes[self->at + 8] != 0))
        return fail(self, "a whole number of %llu bytes; expected at most 64 bits",
                    (unsigned long long)length);
    for (size_t i = 0; i < length && i < 8; i++)
        number |= (uint64_t)self->bytes[self->at + i] << (8 * i);
    if (length > 0 && length < 8 && self->bytes[self->at + length - 1] & 0x80)
        number |= UINT64_MAX << (8 * length);
    self->at += length;
    return push_integer(self, PICKLE_INTEGER, (int64_t)number);
}

static pickle_result push_float(pickle *self) {
    uint64_t bits = 0;
    pickle_value value = {.kind = PICKLE_FLOAT};
    pickle_result result = take_number(self, 8, &bits);
    if (result != PICKLE_READ) return result;
    bits = __builtin_bswap64(bits);
    memcpy(&value.of.number, &bits, sizeof bits);
    return push_value(self, value);
}

static pickle_result push_signed(pickle *self) {
    uint64_t bits = 0;
    pickle_result result = take_number(self, 4, &bits);
    return result == PICKLE_READ ? push_integer(self, PICKLE_INTEGER, (int32_t)(uint32_t)bits)
                                 : result;
}

static pickle_result push_unsigned(pickle *self, size_t bytes) {
    uint64_t number = 0;
    pickle_result result = take_number(self, bytes, &number);
    return result == PICKLE_READ ? push_integer(self, PICKLE_INTEGER, (int64_t)number) : result;
}

/* ---- lists and dicts ------------------------------------------------------------------------- */

/* What may be taken from the stack: what lies above the last mark. */
static size_t height_above_mark(const pickle *self) {
    size_t floor = self->marks.count ? self->marks.at[self->marks.count - 1] : 0;
    return self->stack.count - floor;
}

static pickle_result need(pickle *self, size_t count) {
    if (height_above_mark(self) >= count) return PICKLE_READ;
    return fail(self, "an instruction needs %zu value%s, but the stack has %zu", count,
                count == 1 ? "" : "s", height_above_mark(self));
}

/* Takes the last mark away; what was above it is then the top *count of the stack. */
static pickle_result take_mark(pickle *self, size_t *count) {
    if (self->marks.count == 0) return fail(self, "an instruction needs a mark; there is none");
    *count = height_above_mark(self);
    self->marks.count--;
    return PICKLE_READ;
}

/* Room for `more` items: capacities are powers of two from FIRST_ITEMS on, and follow from the
 * count. */
static int reserve_items(pickle_value *value, uint32_t more) {
    uint64_t needed = (uint64_t)value->count + more;
    uint64_t capacity = FIRST_ITEMS;
    uint64_t has = value->count ? FIRST_ITEMS : 0;
    uint32_t *items;
    while (has && has < value->count)
        has *= 2;
    while (capacity < needed)
        capacity *= 2;
    if (needed <= has || more == 0) return 1;
    if (capacity > UINT32_MAX) return 0;
    items = realloc(value->of.items, capacity * sizeof *items);
    if (!items) return 0;
    value->of.items = items;
    return 1;
}

/* Moves the top `count` values of the stack into the container. */
static pickle_result move_items(pickle *self, uint32_t container, size_t count) {
    pickle_value *value = &self->values[container];
    if (count > UINT32_MAX - value->count || !reserve_items(value, (uint32_t)count))
        return no_memory(self);
    self->stack.count -= count;
    if (count > 0)
        memcpy(value->of.items + value->count, self->stack.at + self->stack.count,
               count * sizeof *value->of.items);
    value->count += (uint32_t)count;
    return PICKLE_READ;
}

/* The top `count` values as a new list, tuple or dict. */
static pickle_result make_container(pickle *self, pickle_kind kind, size_t count) {
    uint32_t made = self->value_count;
    pickle_result result;
    if (kind == PICKLE_DICT && count % 2) return fail(self, "a dict has a key without a value");
    result = push_value(self, (pickle_value){.kind = kind, .of.items = NULL});
    if (result != PICKLE_READ) return result;
    self->stack.count--; /* to the values that go into it, and then back */
    result = move_items(self, made, count);
    return result == PICKLE_READ ? push_known(self, made) : result;
}

static pickle_result make_marked(pickle *self, pickle_kind kind) {
    size_t count = 0;
    pickle_result result = take_mark(self, &count);
    return result == PICKLE_READ ? make_container(self, kind, count) : result;
}

static pickle_result make_tuple(pickle *self, size_t count) {
    pickle_result result = need(self, count);
    return result == PICKLE_READ ? make_container(self, PICKLE_LIST, count) : result;
}

/* The top `count` values go into the container below them. */
static pickle_result extend(pickle *self, pickle_kind kind, size_t count) {
    pickle_result result = need(self, count + 1);
    uint32_t container;
    if (result != PICKLE_READ) return result;
    container = self->stack.at[self->stack.count - count - 1];
    if (self->values[container].kind != kind)
        return fail(self, "items for what is no %s", kind == PICKLE_LIST ? "list" : "dict");
    if (kind == PICKLE_DICT && count % 2) return fail(self, "a dict has a key without a value");
    return move_items(self, container, count);
}

static pickle_result extend_marked(pickle *self, pickle_kind kind) {
    size_t count = 0;
    pickle_result result = take_mark(self, &count);
    return result == PICKLE_READ ? extend(self, kind, count) : result;
}

/* ---- the memo -------------------------------------------------------------------------------- */

static pickle_result memo_put(pickle *self, uint64_t key) {
    pickle_result result = need(self, 1);
    if (result != PICKLE_READ) return result;
    (void)id_table_remove(&self->memo, key); /* the last one counts, as in Python */
    return id_table_insert(&self->memo, key, self->stack.at[self->stack.count - 1])
               ? PICKLE_READ
               : no_memory(self);
}

static pickle_result memo_put_numbered(pickle *self, size_t bytes) {
    uint64_t key = 0;
    pickle_result result = take_number(self, bytes, &key);
    return result == PICKLE_READ ? memo_put(self, key) : result;
}

static pickle_result memo_get(pickle *self, size_t bytes) {
    uint64_t key = 0;
    uint32_t number = 0;
    pickle_result result = take_number(self, bytes, &key);
    if (result != PICKLE_READ) return result;
    if (!id_table_find(&self->memo, key, &number))
        return fail(self, "memo %llu is asked for before it was made", (unsigned long long)key);
    return push_known(self, number);
}

/* ---- what is refused ------------------------------------------------------------------------- */

/* What an instruction is, for the message. */
static const char *refused_name(unsigned char code) {
    switch (code) {
    case 'c': return "GLOBAL, which names a Python object";
    case 0x93: return "STACK_GLOBAL, which names a Python object";
    case 'i': return "INST, which makes a Python object";
    case 'o': return "OBJ, which makes a Python object";
    case 'R': return "REDUCE, which calls a Python function";
    case 'b': return "BUILD, which sets a Python object's state";
    case 0x81: return "NEWOBJ, which makes a Python object";
    case 0x92: return "NEWOBJ_EX, which makes a Python object";
    case 0x82:
    case 0x83:
    case 0x84: return "EXT, which names a Python object";
    case 'P':
    case 'Q': return "PERSID, which refers to an object elsewhere";
    case 0x97:
    case 0x98: return "NEXT_BUFFER, which refers to memory elsewhere";
    case 0x8f:
    case 0x90:
    case 0x91: return "an instruction for sets";
    case 'I':
    case 'F':
    case 'L':
    case 'S':
    case 'T':
    case 'U':
    case 'V':
    case 'g':
    case 'p': return "an instruction of protocols 0 and 1";
    default: return "no instruction of pickles";
    }
}

/* The two texts that name the object, as far as they can be shown. */
static void show_object(const pickle *self, unsigned char code, char *out, size_t bytes) {
    const char *from = (const char *)self->bytes + self->at;
    size_t used = 0;
    size_t lines = 0;
    if (code == 0x93 && self->stack.count >= 2) {
        const pickle_value *module = &self->values[self->stack.at[self->stack.count - 2]];
        const pickle_value *name = &self->values[self->stack.at[self->stack.count - 1]];
        if (module->kind == PICKLE_TEXT && name->kind == PICKLE_TEXT)
            snprintf(out, bytes, "%.*s.%.*s", module->count < 60 ? (int)module->count : 60,
                     module->of.text, name->count < 60 ? (int)name->count : 60, name->of.text);
        used = strlen(out);
    }
    for (size_t i = 0; code == 'c' && i < bytes_left(self) && used + 1 < bytes && lines < 2; i++) {
        lines += from[i] == '\n';
        if (lines < 2) out[used++] = from[i] == '\n' ? '.' : from[i];
    }
    out[used] = 0;
    for (size_t i = 0; i < used; i++) {
        if (out[i] < 0x20 || out[i] > 0x7e) out[i] = '?';
    }
}

static pickle_result refuse(pickle *self, unsigned char code) {
    char shown[128] = "";
    show_object(self, code, shown, sizeof shown);
    return fail(self,
                "instruction 0x%02x is %s%s%s%s; a memory snapshot has plain numbers, texts, lists "
                "and dicts only, and nothing of this file was run",
                code, refused_name(code), shown[0] ? " (" : "", shown, shown[0] ? ")" : "");
}

/* ---- the machine ----------------------------------------------------------------------------- */

static pickle_result read_protocol(pickle *self) {
    uint64_t protocol = 0;
    pickle_result result = take_number(self, 1, &protocol);
    if (result != PICKLE_READ) return result;
    if (protocol >= 2 && protocol <= PROTOCOL_MAX) return PICKLE_READ;
    return fail(self, "protocol %u; expected 2 to %d", (unsigned)protocol, PROTOCOL_MAX);
}

static pickle_result skip_frame(pickle *self) {
    uint64_t length = 0;
    pickle_result result = take_number(self, 8, &length);
    if (result == PICKLE_READ && length > bytes_left(self)) return fail_cut(self);
    return result;
}

static pickle_result stop(pickle *self) {
    pickle_result result = need(self, 1);
    if (result != PICKLE_READ) return result;
    self->root = self->stack.at[self->stack.count - 1];
    self->is_done = 1;
    return PICKLE_READ;
}

static pickle_result pop(pickle *self) {
    pickle_result result = need(self, 1);
    if (result == PICKLE_READ) self->stack.count--;
    return result;
}

static pickle_result pop_mark(pickle *self) {
    size_t count = 0;
    pickle_result result = take_mark(self, &count);
    if (result == PICKLE_READ) self->stack.count -= count;
    return result;
}

static pickle_result duplicate(pickle *self) {
    pickle_result result = need(self, 1);
    return result == PICKLE_READ ? push_known(self, self->stack.at[self->stack.count - 1]) : result;
}

static pickle_result push_mark(pickle *self) {
    if (self->stack.count > UINT32_MAX) return no_memory(self);
    return push_number(&self->marks, (uint32_t)self->stack.count) ? PICKLE_READ : no_memory(self);
}

/* The instructions that make values; *is_known is 0 if it is none of them. */
static pickle_result make_value(pickle *self, unsigned char code, int *is_known) {
    *is_known = 1;
    switch (code) {
    case 'N': return push_value(self, (pickle_value){.kind = PICKLE_NONE});
    case 0x88: return push_integer(self, PICKLE_BOOLEAN, 1);
    case 0x89: return push_integer(self, PICKLE_BOOLEAN, 0);
    case 'J': return push_signed(self);
    case 'K': return push_unsigned(self, 1);
    case 'M': return push_unsigned(self, 2);
    case 0x8a: return push_long(self, 1);
    case 0x8b: return push_long(self, 4);
    case 'G': return push_float(self);
    case 0x8c:
    case 'C': return push_text(self, 1);
    case 'X':
    case 'B': return push_text(self, 4);
    case 0x8d:
    case 0x8e:
    case 0x96: return push_text(self, 8);
    case ']':
    case ')': return make_container(self, PICKLE_LIST, 0);
    case '}': return make_container(self, PICKLE_DICT, 0);
    case 0x85: return make_tuple(self, 1);
    case 0x86: return make_tuple(self, 2);
    case 0x87: return make_tuple(self, 3);
    case 't':
    case 'l': return make_marked(self, PICKLE_LIST);
    case 'd': return make_marked(self, PICKLE_DICT);
    default: *is_known = 0; return PICKLE_READ;
    }
}

static pickle_result step(pickle *self) {
    int is_known = 0;
    unsigned char code;
    pickle_result result;
    self->instruction = self->at;
    if (bytes_left(self) == 0) return fail_cut(self);
    code = self->bytes[self->at++];
    result = make_value(self, code, &is_known);
    if (is_known) return result;
    switch (code) {
    case 0x80: return read_protocol(self);
    case 0x95: return skip_frame(self);
    case '.': return stop(self);
    case '(': return push_mark(self);
    case '0': return pop(self);
    case '1': return pop_mark(self);
    case '2': return duplicate(self);
    case 'a': return extend(self, PICKLE_LIST, 1);
    case 'e': return extend_marked(self, PICKLE_LIST);
    case 's': return extend(self, PICKLE_DICT, 2);
    case 'u': return extend_marked(self, PICKLE_DICT);
    case 'q': return memo_put_numbered(self, 1);
    case 'r': return memo_put_numbered(self, 4);
    case 0x94: return memo_put(self, self->memo.count);
    case 'h': return memo_get(self, 1);
    case 'j': return memo_get(self, 4);
    default: return refuse(self, code);
    }
}

pickle_result pickle_read(const unsigned char *bytes, size_t length, pickle **out, char *error) {
    pickle_result result = PICKLE_READ;
    pickle *self = calloc(1, sizeof *self);
    if (!self) {
        snprintf(error, PICKLE_ERROR_BYTES, "out of host memory");
        return PICKLE_NO_MEMORY;
    }
    self->bytes = bytes;
    self->length = length;
    self->error = error;
    if (length == 0 || bytes[0] != 0x80)
        result = fail(self, "it does not begin as pickles of protocol 2 and later do");
    while (result == PICKLE_READ && !self->is_done)
        result = step(self);
    if (result == PICKLE_READ) {
        *out = self;
    } else {
        pickle_free(self);
    }
    return result;
}

void pickle_free(pickle *self) {
    if (!self) return;
    for (uint32_t i = 0; i < self->value_count; i++) {
        if (self->values[i].kind >= PICKLE_LIST) free(self->values[i].of.items);
    }
    free(self->values);
    free(self->stack.at);
    free(self->marks.at);
    id_table_deinit(&self->memo);
    free(self);
}

/* ---- what was read --------------------------------------------------------------------------- */

const pickle_value *pickle_root(const pickle *self) { return &self->values[self->root]; }

uint32_t pickle_value_count(const pickle *self) { return self->value_count; }

uint32_t pickle_value_number(const pickle *self, const pickle_value *value) {
    return (uint32_t)(value - self->values);
}

const pickle_value *pickle_item(const pickle *self, const pickle_value *list, uint32_t index) {
    return &self->values[list->of.items[index]];
}

int pickle_is_text(const pickle_value *value, const char *text) {
    size_t length = strlen(text);
    return value && value->kind == PICKLE_TEXT && value->count == length &&
           memcmp(value->of.text, text, length) == 0;
}

const pickle_value *pickle_member(const pickle *self, const pickle_value *dict, const char *name) {
    if (!dict || dict->kind != PICKLE_DICT) return NULL;
    for (uint32_t i = dict->count; i >= 2; i -= 2) {
        if (pickle_is_text(&self->values[dict->of.items[i - 2]], name))
            return &self->values[dict->of.items[i - 1]];
    }
    return NULL;
}
