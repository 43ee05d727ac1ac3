/* One function a verb, called by program.c with parsed options. Each returns the exit code or dies. Floor 4. */
#ifndef LLMC_COMMANDS_H
#define LLMC_COMMANDS_H

#include "trainer.h"

C_BEGIN

int command_train(const Options *options, const Machine *machine);
int command_eval(const Options *options, const Machine *machine);
int command_generate(const Options *options, const Machine *machine);
int command_plan(const Options *options, const Machine *machine);
int command_tokenize(const Options *options);
int command_quantize(const Options *options);
int command_export(const Options *options, const Machine *machine);
int command_compare(const Options *options);

C_END
#endif
