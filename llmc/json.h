/* JSON over cJSON: parsing with clear errors, exact integers, floats as %.9g. json.c is the only file that includes
 * cJSON. A Json is a cJSON node; a child belongs to its parent, the root is freed with json_free.
 *
 * Floor 0.
 */
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include "common.h"

C_BEGIN

typedef struct cJSON Json;

typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

/* Parse the whole text (anything but white space after the value is an error). NULL and `error` on failure, which names
 * line and column. `name` is what the message calls the text (a path). Duplicate keys in an object are an error. */
Json *json_parse(const char *text, size_t length, const char *name, Error *error);
Json *json_read_file(const char *path, Error *error); /* at most 100 MB */
void json_free(Json *json);

JsonType json_type(const Json *json);
const char *json_key(const Json *member);      /* its key within its object */
const Json *json_first(const Json *container); /* first element or member, NULL when empty; then: */
const Json *json_next(const Json *element);    /* NULL at the end */
int64_t json_count(const Json *container);
const Json *json_get(const Json *object, const char *key); /* NULL when absent or not an object */

/* Value of a node: false when it is absent (NULL) or of another type. Integers must be whole and within int64. */
bool json_int(const Json *json, int64_t *value);
bool json_number(const Json *json, double *value);
bool json_bool(const Json *json, bool *value);
const char *json_string(const Json *json); /* NULL when not a string; owned by the node */

/* Build. The container owns what is added; every add returns the new node. */
Json *json_new_object(void);
Json *json_new_array(void);
Json *json_add_object(Json *object, const char *key);
Json *json_add_array(Json *object, const char *key);
void json_add_int(Json *object, const char *key, int64_t value);
void json_add_float(Json *object, const char *key,
                    double value); /* %.9g; not finite: the string "nan", "inf", "-inf" */
void json_add_double(Json *object, const char *key, double value); /* shortest that reads back, same rule */
void json_add_bool(Json *object, const char *key, bool value);
void json_add_null(Json *object, const char *key);
void json_add_string(Json *object, const char *key, const char *value);
void json_append_int(Json *array, int64_t value);
void json_append_float(Json *array, double value);
Json *json_append_object(Json *array);
void json_append_string(Json *array, const char *value);

char *json_print(const Json *json, bool indented); /* owned by the caller; no newline at the end */

C_END
#endif
