/* The program of the reader (../README.md): a line for each file, and a line as its answer. */
#include "kvpack.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT ((uint64_t)1 << 32)

static kv_bytes read_file(kv_reader *r, const char *path) {
    FILE *file = fopen(path, "rb");
    long size = -1;
    if (file && !fseek(file, 0, SEEK_END)) size = ftell(file);
    if (size < 0 || (uint64_t)size > LIMIT || fseek(file, 0, SEEK_SET)) {
        if (file) fclose(file);
        kv_fail(r, LIMIT_EXCEEDED, "container-29", "%s is no file, or one that is too large", path);
    }
    uint8_t *data = kv_take(r, (uint64_t)size, 1);
    size_t found = fread(data, 1, (size_t)size, file);
    fclose(file);
    return (kv_bytes){data, found};
}

static void write_values(kv_file *file, const char *path) {
    kv_reader *r = file->reader;
    uint64_t count = 0, at = 0;
    for (unsigned l = 0; l < file->layer_count; l++)
        for (int which = 0; which < 2; which++)
            if (file->layers[l].sides[which])
                count = kv_plus(count, kv_value_count(file->layers[l].sides[which]));
    if (kv_times(count, sizeof(float)) > r->limit)
        kv_fail(r, LIMIT_EXCEEDED, "container-29", "there are %llu values", (unsigned long long)count);
    float *values = kv_take(r, count, sizeof *values);
    for (unsigned l = 0; l < file->layer_count; l++)
        for (int which = 0; which < 2; which++)
            if (file->layers[l].sides[which]) {
                kv_decode(file, file->layers[l].sides[which], values + at);
                at += kv_value_count(file->layers[l].sides[which]);
            }
    uint8_t *bytes = (uint8_t *)values;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        for (int k = 0; k < 4; k++) bytes[4 * i + (uint64_t)k] = (uint8_t)(bits >> 8 * k);
    }
    FILE *out = fopen(path, "wb");
    bool written = out && fwrite(bytes, 4, (size_t)count, out) == count;
    if ((out && fclose(out)) || !written) kv_fail(r, OUT_OF_MEMORY, "front-15", "%s cannot be written", path);
}

/* Read, check and decode the file of a line, and write its values. */
static void accept(kv_reader *r, char *line, kv_text *facts) {
    kv_bytes bases[64];
    const char *path = line, *output = "", *names[64];
    for (int field = 1; (line = strchr(line, '\t')) != NULL; field++) {
        *line++ = 0;
        if (field == 1) output = line;
        else if (r->base_count < 64) names[r->base_count++] = line;
    }
    for (size_t i = 0; i < r->base_count; i++) bases[i] = read_file(r, names[i]);
    r->bases = bases;
    kv_bytes bytes = read_file(r, path);
    size_t length = strlen(path);
    bool page = length > 4 && !strcmp(path + length - 4, ".row");
    kv_file *file = page ? kv_open_page(r, bytes) : kv_open(r, bytes);
    kv_check(file);
    write_values(file, output);
    kv_write_facts(file, facts);
}

static void answer(char *line) {
    kv_reader reader = {.limit = LIMIT};
    kv_text facts = {&reader, NULL, 0, 0};
    if (!setjmp(reader.refused)) {
        accept(&reader, line, &facts);
        printf("ok\t%s\n", facts.data);
    } else {
        printf("%s\t%s\t\"", kv_kind_names[reader.kind], reader.rule);
        for (const char *c = reader.message; *c; c++)
            if (*c == '"' || *c == '\\' || (uint8_t)*c < 32 || (uint8_t)*c > 126)
                printf("\\u%04x", (uint8_t)*c);
            else putchar(*c);
        printf("\"\n");
    }
    fflush(stdout);
    kv_free(&reader);
}

int main(void) {
    size_t room = 1 << 16, size = 0;
    char *line = malloc(room);
    while (line && fgets(line + size, (int)(room - size), stdin)) {
        size += strlen(line + size);
        if (size && line[size - 1] == '\n') {
            line[size - 1] = 0;
            answer(line);
            size = 0;
        } else if (size + 1 == room && room < 1 << 24) {
            char *more = realloc(line, room *= 2);
            if (!more) break;
            line = more;
        }
    }
    free(line);
    return 0;
}
