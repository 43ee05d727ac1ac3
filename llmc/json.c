/* JSON over cJSON: see json.h.
 *
 * cJSON builds the tree; a second, strict walk over text and tree together repairs what it is lax about. It keeps a
 * double of every number, so the walk turns each number node into a raw node that holds the number's own text:
 * integers stay exact over all of int64, and what is printed is what was read. The walk also refuses what cJSON lets
 * pass: duplicate keys, numbers such as 01 or 1., control characters, and \u0000 (which would cut a C string short).
 */
#include "json.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FILE_BYTES = 100 * 1000 * 1000 };

/* ---- parsing ---- */

typedef struct {
    const char *text, *at; /* NUL-terminated; the walk's place in it */
    const char *name;
    Error *error;
} Cursor;

typedef struct {
    const char *key; /* owned by the node */
    const char *at;  /* where it stands in the text */
} KeyPlace;

static int walk_value(Cursor *c, Json *node);

static int fail_at(const Cursor *c, const char *at, const char *what, const char *detail)
{
    int64_t line = 1, column = 1;
    for (const char *p = c->text; p < at; p++) {
        column = *p == '\n' ? 1 : column + 1;
        line += *p == '\n';
    }
    return error_set(c->error, "%s: line %" PRId64 ", column %" PRId64 ": %s%s", c->name, line, column, what, detail);
}

static void skip_space(Cursor *c) { c->at += strspn(c->at, " \t\r\n"); }

/* White space, then this character. */
static int expect(Cursor *c, char character)
{
    skip_space(c);
    if (*c->at != character) return fail_at(c, c->at, "not valid JSON", "");
    c->at++;
    return 0;
}

/* Length of the JSON number that starts here, 0 when there is none. */
static size_t number_length(const char *text)
{
    static const char digits[] = "0123456789";
    const char *p = text + (*text == '-');
    size_t whole = strspn(p, digits);
    if (whole == 0 || (whole > 1 && *p == '0')) return 0;
    p += whole;
    if (*p == '.') {
        size_t fraction = strspn(++p, digits);
        if (fraction == 0) return 0;
        p += fraction;
    }
    if (*p == 'e' || *p == 'E') {
        p++;
        if (*p == '+' || *p == '-') p++;
        size_t exponent = strspn(p, digits);
        if (exponent == 0) return 0;
        p += exponent;
    }
    return (size_t)(p - text);
}

static int walk_number(Cursor *c, Json *node)
{
    size_t length = number_length(c->at);
    if (length == 0 || length != strspn(c->at, "+-.0123456789eE")) return fail_at(c, c->at, "not a JSON number", "");
    node->type = cJSON_Raw;
    node->valuestring = xformat("%.*s", (int)length, c->at);
    c->at += length;
    return 0;
}

static int walk_string(Cursor *c)
{
    if (expect(c, '"')) return -1;
    for (; *c->at != '"'; c->at++) {
        if ((unsigned char)*c->at < 0x20) return fail_at(c, c->at, "control character in a string", "");
        if (*c->at != '\\') continue;
        if (strncmp(c->at, "\\u0000", 6) == 0) return fail_at(c, c->at, "\\u0000 in a string", "");
        c->at++;
    }
    c->at++;
    return 0;
}

static int compare_keys(const void *a, const void *b)
{
    const KeyPlace *x = a, *y = b;
    int order = strcmp(x->key, y->key);
    return order ? order : (x->at > y->at) - (x->at < y->at);
}

static int check_keys(const Cursor *c, KeyPlace *keys, int64_t count)
{
    qsort(keys, (size_t)count, sizeof *keys, compare_keys);
    for (int64_t i = 1; i < count; i++)
        if (strcmp(keys[i - 1].key, keys[i].key) == 0) return fail_at(c, keys[i].at, "duplicate key ", keys[i].key);
    return 0;
}

static int walk_object(Cursor *c, Json *object)
{
    int64_t count = 0;
    KeyPlace *keys = xcalloc((size_t)json_count(object), sizeof *keys);
    int result = expect(c, '{');
    for (Json *member = object->child; member && result == 0; member = member->next) {
        if (count > 0) result = expect(c, ',');
        skip_space(c);
        keys[count++] = (KeyPlace){member->string, c->at};
        if (result || walk_string(c) || expect(c, ':') || walk_value(c, member)) result = -1;
    }
    if (result == 0) result = expect(c, '}');
    if (result == 0) result = check_keys(c, keys, count);
    free(keys);
    return result;
}

static int walk_array(Cursor *c, Json *array)
{
    if (expect(c, '[')) return -1;
    for (Json *element = array->child; element; element = element->next)
        if ((element != array->child && expect(c, ',')) || walk_value(c, element)) return -1;
    return expect(c, ']');
}

static int walk_value(Cursor *c, Json *node)
{
    skip_space(c);
    switch (node->type) {
    case cJSON_Object:
        return walk_object(c, node);
    case cJSON_Array:
        return walk_array(c, node);
    case cJSON_String:
        return walk_string(c);
    case cJSON_Number:
        return walk_number(c, node);
    default:
        break;
    }
    const char *literal = node->type == cJSON_NULL ? "null" : node->type == cJSON_True ? "true" : "false";
    if (strncmp(c->at, literal, strlen(literal)) != 0) return fail_at(c, c->at, "not valid JSON", "");
    c->at += strlen(literal);
    return 0;
}

/* `text` is NUL-terminated, for the walk and because some versions of cJSON look at the byte after the end. */
static Json *parse(const char *text, size_t length, const char *name, Error *error)
{
    Cursor cursor = {text, text, name, error};
    const char *end = text;
    Json *root = cJSON_ParseWithLengthOpts(text, length, &end, false);
    if (!root) {
        fail_at(&cursor, end, length == 0 ? "empty" : "not valid JSON", "");
        return NULL;
    }
    if (strncmp(text, "\xEF\xBB\xBF", 3) == 0) cursor.at += 3; /* a byte order mark; cJSON skips it too */
    int result = walk_value(&cursor, root);
    skip_space(&cursor);
    if (result == 0 && cursor.at != text + length)
        result = fail_at(&cursor, cursor.at, "something follows the end of the value", "");
    if (result == 0) return root;
    cJSON_Delete(root);
    return NULL;
}

Json *json_parse(const char *text, size_t length, const char *name, Error *error)
{
    char *copy = xmalloc(length + 1);
    if (length > 0) memcpy(copy, text, length);
    copy[length] = 0;
    Json *root = parse(copy, length, name, error);
    free(copy);
    return root;
}

Json *json_read_file(const char *path, Error *error)
{
    FILE *stream = fopen(path, "rb");
    if (!stream) {
        error_set(error, "cannot open %s: %s", path, strerror(errno));
        return NULL;
    }
    size_t length = 0, room = 1 << 16;
    char *text = xmalloc(room + 1);
    for (size_t got; (got = fread(text + length, 1, room - length, stream)) > 0;) {
        length += got;
        if (length == room && room <= MAX_FILE_BYTES) text = xrealloc(text, (room *= 2) + 1);
    }
    Json *root = NULL;
    text[length] = 0;
    if (ferror(stream))
        error_set(error, "cannot read %s: %s", path, strerror(errno));
    else if (length > MAX_FILE_BYTES)
        error_set(error, "cannot read %s: a JSON file of more than %d bytes", path, MAX_FILE_BYTES);
    else
        root = parse(text, length, path, error);
    fclose(stream);
    free(text);
    return root;
}

void json_free(Json *json) { cJSON_Delete(json); }

/* ---- looking ---- */

JsonType json_type(const Json *json)
{
    switch (json->type) {
    case cJSON_Raw:
        return JSON_NUMBER;
    case cJSON_String:
        return JSON_STRING;
    case cJSON_Array:
        return JSON_ARRAY;
    case cJSON_Object:
        return JSON_OBJECT;
    case cJSON_NULL:
        return JSON_NULL;
    default:
        return JSON_BOOL;
    }
}

const char *json_key(const Json *member) { return member->string; }
const Json *json_first(const Json *container) { return container->child; }
const Json *json_next(const Json *element) { return element->next; }

int64_t json_count(const Json *container)
{
    int64_t count = 0;
    for (const Json *element = container->child; element; element = element->next) count++;
    return count;
}

const Json *json_get(const Json *object, const char *key)
{
    return cJSON_IsObject(object) ? cJSON_GetObjectItemCaseSensitive(object, key) : NULL;
}

bool json_int(const Json *json, int64_t *value)
{
    const double exact = 9007199254740992.0; /* 2^53: beyond it a double skips integers */
    if (!cJSON_IsRaw(json)) return false;
    char *end;
    errno = 0;
    int64_t integer = strtoll(json->valuestring, &end, 10);
    if (*end == 0) {
        if (errno) return false;
        *value = integer;
        return true;
    }
    double number = strtod(json->valuestring, NULL); /* 1e6, 2.0 */
    if (!(fabs(number) <= exact) || number != floor(number)) return false;
    *value = (int64_t)number;
    return true;
}

bool json_number(const Json *json, double *value)
{
    if (!cJSON_IsRaw(json)) return false;
    double number = strtod(json->valuestring, NULL);
    if (!isfinite(number)) return false;
    *value = number;
    return true;
}

bool json_bool(const Json *json, bool *value)
{
    if (!cJSON_IsBool(json)) return false;
    *value = cJSON_IsTrue(json);
    return true;
}

const char *json_string(const Json *json) { return cJSON_IsString(json) ? json->valuestring : NULL; }

/* ---- building ---- */

/* `item` now belongs to `container`; key NULL: an array. */
static Json *add(Json *container, const char *key, Json *item)
{
    if (!item || !(key ? cJSON_AddItemToObject(container, key, item) : cJSON_AddItemToArray(container, item)))
        die("out of memory: could not build JSON");
    return item;
}

static Json *new_int(int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, value);
    return cJSON_CreateRaw(text);
}

static Json *new_real(double value, int digits)
{
    char text[40];
    if (isnan(value)) return cJSON_CreateString("nan");
    if (isinf(value)) return cJSON_CreateString(value > 0 ? "inf" : "-inf");
    for (int d = digits < 15 ? digits : 15; d <= digits; d++) { /* of 17 digits 15 often read back as the value */
        snprintf(text, sizeof text, "%.*g", d, value);
        if (strtod(text, NULL) == value) break;
    }
    return cJSON_CreateRaw(text);
}

Json *json_new_object(void)
{
    Json *object = cJSON_CreateObject();
    if (!object) die("out of memory: could not build JSON");
    return object;
}

Json *json_new_array(void)
{
    Json *array = cJSON_CreateArray();
    if (!array) die("out of memory: could not build JSON");
    return array;
}

Json *json_add_object(Json *object, const char *key) { return add(object, key, cJSON_CreateObject()); }
Json *json_add_array(Json *object, const char *key) { return add(object, key, cJSON_CreateArray()); }
void json_add_int(Json *object, const char *key, int64_t value) { add(object, key, new_int(value)); }
void json_add_float(Json *object, const char *key, double value) { add(object, key, new_real(value, 9)); }
void json_add_double(Json *object, const char *key, double value) { add(object, key, new_real(value, 17)); }
void json_add_bool(Json *object, const char *key, bool value) { add(object, key, cJSON_CreateBool(value)); }
void json_add_string(Json *object, const char *key, const char *value) { add(object, key, cJSON_CreateString(value)); }
void json_add_null(Json *object, const char *key) { add(object, key, cJSON_CreateNull()); }
void json_append_int(Json *array, int64_t value) { add(array, NULL, new_int(value)); }
void json_append_float(Json *array, double value) { add(array, NULL, new_real(value, 9)); }
Json *json_append_object(Json *array) { return add(array, NULL, cJSON_CreateObject()); }
void json_append_string(Json *array, const char *value) { add(array, NULL, cJSON_CreateString(value)); }

char *json_print(const Json *json, bool indented)
{
    char *text = indented ? cJSON_Print(json) : cJSON_PrintUnformatted(json);
    if (!text) die("out of memory: could not print JSON");
    return text;
}
