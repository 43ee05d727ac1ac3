/* See export.h. */
#include "export.h"

int export_model(Model *model, const char *dir, ExportFormat format, Error *error)
{
    (void)model, (void)dir, (void)format;
    return error_set(error, "not there yet");
}
