/* json.c: what is read, what is refused and where, exact numbers, and text that no one meant well. */
#include "json.h"
#include "test.h"
#include "test_files.h"

#include <inttypes.h>
#include <math.h>

static Json *parse(const char *text, Error *error) { return json_parse(text, strlen(text), "t.json", error); }

static void test_reading(void)
{
    Error error = {""};
    test_case("reading: every type, order, nesting");
    Json *root = parse("\t{\"a\": [1, 2.5, -3e2, true, null], \"b\": {\"c\": \"x\\n\\u00e9\"}, \"A\": false}\r\n",
                       &error);
    if (!CHECK(root, "%s", error.text)) return;
    const Json *a = json_get(root, "a"), *b = json_get(root, "b");
    CHECK(json_type(root) == JSON_OBJECT && json_count(root) == 3, "root");
    CHECK(json_type(a) == JSON_ARRAY && json_count(a) == 5, "array");
    const Json *item = json_first(a);
    int64_t i = 0;
    double x = 0;
    bool flag = false;
    CHECK(json_key(item) == NULL && json_type(item) == JSON_NUMBER && json_int(item, &i) && i == 1, "1");
    item = json_next(item);
    CHECK(!json_int(item, &i) && i == 1 && json_number(item, &x) && x == 2.5, "2.5");
    item = json_next(item);
    CHECK(json_int(item, &i) && i == -300 && json_number(item, &x) && x == -300, "-3e2");
    item = json_next(item);
    CHECK(json_type(item) == JSON_BOOL && json_bool(item, &flag) && flag && !json_int(item, &i), "true");
    item = json_next(item);
    CHECK(json_type(item) == JSON_NULL && !json_bool(item, &flag) && json_next(item) == NULL, "null");
    CHECK(strcmp(json_key(b), "b") == 0 && strcmp(json_string(json_get(b, "c")), "x\n\xc3\xa9") == 0, "string");
    CHECK(json_bool(json_get(root, "A"), &flag) && !flag, "keys differ by case");
    CHECK(json_get(root, "none") == NULL && json_get(a, "a") == NULL && json_get(NULL, "a") == NULL, "absent");
    CHECK(!json_int(NULL, &i) && !json_number(NULL, &x) && !json_bool(NULL, &flag) && !json_string(NULL), "NULL");
    CHECK(json_string(a) == NULL && json_string(json_first(a)) == NULL, "not strings");
    json_free(root);

    test_case("reading: empty containers, lone values, byte order mark");
    const char *whole[] = {"{}", "[]", " [ ] ", "{ }", "7", "\"s\"", "null", "\xEF\xBB\xBF{\"a\":1}"};
    for (size_t k = 0; k < sizeof whole / sizeof whole[0]; k++) {
        root = parse(whole[k], &error);
        CHECK(root, "%s: %s", whole[k], error.text);
        if (root && json_type(root) == JSON_ARRAY) CHECK(!json_first(root) && json_count(root) == 0, "empty");
        json_free(root);
    }
    json_free(NULL);
}

typedef struct {
    const char *text, *message;
} Refused;

static void test_refusals(void)
{
    static const Refused cases[] = {
        {"", "t.json: line 1, column 1: empty"},
        {"  ", "t.json: line 1, column "},
        {"{\n  \"a\": 1,\n  \"b\": 2,\n  \"a\": 3\n}", "t.json: line 4, column 3: duplicate key a"},
        {"{\"o\": {\"k\": 1, \"k\": 1}}", "t.json: line 1, column 16: duplicate key k"},
        {"{\"a\\u0062\": 1,\n \"ab\": 2}", "t.json: line 2, column 2: duplicate key ab"},
        {"{\"a\": 1} x", "t.json: line 1, column 10: something follows"},
        {"{}{}", "t.json: line 1, column 3: something follows"},
        {"[1, 2,]", "t.json: line 1, column 7: not valid JSON"},
        {"{\"a\": 1,}", "t.json: line 1, column 9: not valid JSON"},
        {"{\"a\": 1,", "t.json: line 1, column "},
        {"{\"a\"", "t.json: line 1, column "},
        {"{a: 1}", "t.json: line 1, column "},
        {"[1 2]", "t.json: line 1, column 4: not valid JSON"},
        {"[\n01]", "t.json: line 2, column 1: not a JSON number"},
        {"[1.]", "t.json: line 1, column 2: not a JSON number"},
        {"[-]", "t.json: line 1, column "},
        {"[1e]", "t.json: line 1, column "},
        {"[.5]", "t.json: line 1, column 2: not valid JSON"},
        {"[+1]", "t.json: line 1, column 2: not valid JSON"},
        {"[nan]", "t.json: line 1, column 2: not valid JSON"},
        {"[tru]", "t.json: line 1, column 2: not valid JSON"},
        {"[1,\f2]", "t.json: line 1, column 4: not "},
        {"[\"a\tb\"]", "t.json: line 1, column 4: control character"},
        {"[\"a\\u0000b\"]", "t.json: line 1, column 4: \\u0000 in a string"},
        {"[\"\\ud800\"]", "t.json: line 1, column "},
        {"[\"\\x\"]", "t.json: line 1, column "},
        {"[\"abc", "t.json: line 1, column "},
        {"'a'", "t.json: line 1, column 1: not valid JSON"},
        {"/* */ 1", "t.json: line 1, column 1: not valid JSON"},
    };
    test_case("refusals name line and column");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Error error = {""};
        Json *root = parse(cases[i].text, &error);
        CHECK(!root, "%s was read", cases[i].text);
        CHECK(strncmp(error.text, cases[i].message, strlen(cases[i].message)) == 0, "%s: %s", cases[i].text,
              error.text);
        json_free(root);
    }

    test_case("refusals: a NUL within the text, nesting without end");
    Error error = {""};
    CHECK(!json_parse("[1,\0002]", 6, "t.json", &error), "NUL between values");
    CHECK(!json_parse("[1]\0", 4, "t.json", &error), "NUL at the end");
    CHECK(!json_parse("[\"a\0b\"]", 7, "t.json", NULL), "NUL in a string");
    enum { DEEP = 1000000 };
    char *deep = xmalloc(DEEP);
    memset(deep, '[', DEEP);
    CHECK(!json_parse(deep, DEEP, "t.json", &error), "a million brackets");
    free(deep);
    Json *escaped = json_parse("[\"\\\\u0000\"]", 11, "t.json", &error);
    CHECK(escaped, "an escaped backslash before u0000: %s", error.text);
    json_free(escaped);
}

static void test_integers(void)
{
    static const int64_t values[] = {0,
                                     1,
                                     -1,
                                     INT32_MAX,
                                     INT64_C(9007199254740991),
                                     INT64_C(9007199254740993),
                                     INT64_MAX,
                                     INT64_MIN,
                                     INT64_C(-9007199254740993)};
    test_case("integers: exact over all of int64, written and read");
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        Error error = {""};
        int64_t value = 0;
        Json *object = json_new_object();
        json_add_int(object, "v", values[i]);
        CHECK(json_int(json_get(object, "v"), &value) && value == values[i], "built %" PRId64, value);
        char *text = json_print(object, false), *expected = xformat("{\"v\":%" PRId64 "}", values[i]);
        CHECK(strcmp(text, expected) == 0, "%s", text);
        Json *read = parse(text, &error);
        value = 0;
        CHECK(json_int(json_get(read, "v"), &value) && value == values[i], "%" PRId64 " %s", value, error.text);
        json_free(object);
        json_free(read);
        free(text);
        free(expected);
    }

    test_case("integers: refused when not whole or beyond int64");
    Error error = {""};
    int64_t value;
    double number;
    Json *list = parse("[9223372036854775808, -9223372036854775809, 1e19, 0.5, 1e-3, 1e400, 1e16]", &error);
    for (const Json *item = json_first(list); item; item = json_next(item))
        CHECK(!json_int(item, &value), "read as %" PRId64, value);
    json_free(list);
    list = parse("[1e400, 1e3, 2.0, -0, 9007199254740992e0]", &error);
    const Json *item = json_first(list);
    CHECK(!json_number(item, &number), "1e400 is not a number we can hold");
    int64_t whole[] = {1000, 2, 0, INT64_C(9007199254740992)};
    for (int i = 0; i < 4; i++) {
        item = json_next(item);
        CHECK(json_int(item, &value) && value == whole[i], "%d: %" PRId64, i, value);
    }
    json_free(list);
}

static void test_building(void)
{
    test_case("building: the text, floats, what is not finite");
    Json *root = json_new_object();
    json_add_string(root, "s", "a\"b\n");
    json_add_float(root, "f", 0.1f);
    json_add_float(root, "tiny", 1e-300);
    json_add_double(root, "d", 0.1);
    json_add_float(root, "nan", -NAN);
    json_add_float(root, "inf", INFINITY);
    json_add_double(root, "minus", -INFINITY);
    json_add_bool(root, "t", true);
    json_add_bool(root, "n", false);
    Json *list = json_add_array(root, "l");
    json_append_int(list, -5);
    json_append_string(list, "x");
    json_add_int(json_add_object(root, "o"), "i", 7);
    char *text = json_print(root, false), *indented = json_print(root, true);
    CHECK(strcmp(text,
                 "{\"s\":\"a\\\"b\\n\",\"f\":0.100000001,\"tiny\":1e-300,\"d\":0.1,\"nan\":\"nan\","
                 "\"inf\":\"inf\",\"minus\":\"-inf\",\"t\":true,\"n\":false,\"l\":[-5,\"x\"],\"o\":{\"i\":7}}") == 0,
          "%s", text);
    CHECK(strchr(indented, '\n') && indented[strlen(indented) - 1] == '}', "%s", indented);

    Error error = {""};
    double value = 0;
    Json *read = parse(indented, &error);
    char *again = json_print(read, false);
    CHECK(strcmp(text, again) == 0, "read and printed again: %s %s", again, error.text);
    CHECK(json_number(json_get(read, "d"), &value) && value == 0.1, "%%.17g gives the double back");
    CHECK(json_number(json_get(read, "f"), &value) && (float)value == 0.1f, "%%.9g gives the float back");
    json_free(root);
    json_free(read);
    free(text);
    free(indented);
    free(again);

    list = json_new_array();
    text = json_print(list, false);
    CHECK(strcmp(text, "[]") == 0, "%s", text);
    free(text);
    json_free(list);
}

static void test_printing_what_was_read(void)
{
    Error error = {""};
    test_case("numbers are printed as they were read");
    const char *text = "[1.50,1E+2,-0,12345678901234567890123,0.1000000000000000000000001]";
    Json *list = parse(text, &error);
    char *printed = json_print(list, false);
    CHECK(strcmp(printed, text) == 0, "%s", printed);
    free(printed);
    json_free(list);
}

static void test_files(const char *folder)
{
    Error error = {""};
    char *path = xformat("%s/config.json", folder);
    test_case("files: read, missing, a folder, broken, large");
    test_write_file(path, "{\"a\": 12}\n", 10);
    Json *root = json_read_file(path, &error);
    int64_t value = 0;
    CHECK(root && json_int(json_get(root, "a"), &value) && value == 12, "read");
    json_free(root);
    CHECK(!json_read_file("/nowhere/x.json", &error) && strstr(error.text, "/nowhere/x.json: No such file"), "%s",
          error.text);
    CHECK(!json_read_file(folder, &error) && strstr(error.text, "directory"), "%s", error.text);
    test_write_file(path, "{\n\"a\" 12}\n", 10);
    CHECK(!json_read_file(path, &error) && strstr(error.text, "config.json: line 2, column 5"), "%s", error.text);
    test_write_file(path, "", 0);
    CHECK(!json_read_file(path, &error) && strstr(error.text, "empty"), "%s", error.text);
    if (test_sparse_file(path, "1", 1, 100 * 1000 * 1000 + 1))
        CHECK(!json_read_file(path, &error) && strstr(error.text, "more than 100000000 bytes"), "%s", error.text);

    enum { ITEMS = 100000 };
    Json *list = json_new_array();
    for (int i = 0; i < ITEMS; i++) json_append_int(list, i);
    char *text = json_print(list, false);
    test_write_file(path, text, strlen(text));
    root = json_read_file(path, &error);
    CHECK(root && json_count(root) == ITEMS, "100,000 numbers, several pieces of the file");
    json_free(root);
    json_free(list);
    free(text);
    free(path);
}

static void test_many_keys(void)
{
    enum { KEYS = 150000 };
    Error error = {""};
    test_case("an object of a vocabulary's size is read without comparing all pairs of keys");
    Json *object = json_new_object();
    for (int i = 0; i < KEYS; i++) {
        char *key = xformat("token%d", i);
        json_add_int(object, key, i);
        free(key);
    }
    char *text = json_print(object, false);
    double start = now_seconds();
    Json *read = parse(text, &error);
    CHECK(read && json_count(read) == KEYS && now_seconds() - start < 10, "%s", error.text);
    json_free(object);
    json_free(read);
    free(text);
}

/* Reads data; what was read must print, read again, and print the same. */
static bool survives(const char *data, size_t bytes)
{
    Error error = {""};
    char *exact = xmalloc(bytes); /* no byte more, so that a sanitizer sees a read beyond it */
    memcpy(exact, data, bytes);
    Json *root = json_parse(exact, bytes, "fuzz", &error);
    free(exact);
    if (!root) return error.text[0] != 0;
    char *text = json_print(root, false);
    Json *again = parse(text, &error);
    char *second = again ? json_print(again, false) : xstrdup("");
    bool same = strcmp(text, second) == 0;
    json_free(root);
    json_free(again);
    free(text);
    free(second);
    return same;
}

static void test_hostile_text(void)
{
    static const char text[] =
        "{\"model_type\": \"gpt2\", \"sizes\": [12, -768, 1.5e-5, 9007199254740993], \"tie\": true,\n"
        " \"rope\": {\"factor\": 8.0, \"x\": null, \"e\": \"\\u00e9\\ud83d\\ude00\\n\"}, \"l\": [[], {}]}";
    test_case("every truncation is refused");
    Error error = {""};
    for (size_t bytes = 0; bytes < sizeof text - 1; bytes++) {
        char *exact = xmalloc(bytes);
        memcpy(exact, text, bytes);
        Json *root = json_parse(exact, bytes, "cut", &error);
        CHECK(!root, "%zu bytes were enough", bytes);
        json_free(root);
        free(exact);
    }
    test_case("mutated text is read or refused");
    for (uint32_t i = 0; i < (test_long() ? 1000000 : 20000); i++) {
        char data[sizeof text];
        size_t bytes = sizeof text - 1;
        memcpy(data, text, sizeof text);
        test_mutate(data, &bytes, bytes / 2, i);
        CHECK(survives(data, bytes), "mutation %u", i);
    }
}

int main(void)
{
    char *folder = test_folder();
    test_reading();
    test_refusals();
    test_integers();
    test_building();
    test_printing_what_was_read();
    test_files(folder);
    test_many_keys();
    test_hostile_text();
    test_folder_remove(folder);
    return test_done();
}
