/* Runs the files of the folder that is named on the command line, as libFuzzer would. */
#include "world.h"

#include <dirent.h>
#include <stdio.h>

static int replay(const char *folder, const char *name) {
    static uint8_t bytes[1u << 16];
    char path[4096];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (file == NULL) return 0;
    const size_t size = fread(bytes, 1, sizeof bytes, file);
    (void)fclose(file);
    (void)LLVMFuzzerTestOneInput(bytes, size);
    return 1;
}

int main(int count, char **arguments) {
    int files = 0;
    DIR *folder = count == 2 ? opendir(arguments[1]) : NULL;
    if (folder == NULL) {
        fprintf(stderr, "usage: %s FOLDER\n", arguments[0]);
        return 2;
    }
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
        if (entry->d_name[0] != '.') files += replay(arguments[1], entry->d_name);
    (void)closedir(folder);
    printf("%d files\n", files);
    return files == 0;
}
