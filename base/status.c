#include <penstock/status.h>

const char *pst_status_name(pst_status status) {
    switch (status) {
#define PST_STATUS_NAME(name, value, text)                                                         \
    case PST_##name:                                                                               \
        return #name;
        PST_STATUS_MAP(PST_STATUS_NAME)
#undef PST_STATUS_NAME
    }
    return "EUNKNOWN";
}

const char *pst_status_text(pst_status status) {
    switch (status) {
#define PST_STATUS_TEXT(name, value, text)                                                         \
    case PST_##name:                                                                               \
        return text;
        PST_STATUS_MAP(PST_STATUS_TEXT)
#undef PST_STATUS_TEXT
    }
    return "unknown status";
}
