/* A trained model as a folder that Hugging Face transformers, vLLM and TensorRT-LLM read.
 *
 *     config.json              the architecture in their terms; for NVFP4 also quantization_config
 *     model.safetensors        BF16, or for quantized layers weight (U8, packed), weight_scale (E4M3), weight_scale_2 (F32)
 *     hf_quant_config.json     NVFP4: the same for ModelOpt's readers
 *     generation_config.json   token ids
 *
 * NVFP4 is ModelOpt's weight-only layout (W4A16_NVFP4). The exported weights are those that fprop reads at the saved step:
 * scales of 16 x 16 blocks are repeated on their rows, parts of a fused matrix keep its one tensor scale. So codes and
 * block scales are those of training, and the tensor scale is within an FP32 rounding of it (pow2: it is it). Layers that the recipe keeps in BF16 are in the ignore list. Floor 4.
 */
#ifndef LLMC_EXPORT_H
#define LLMC_EXPORT_H

#include "model.h"
#include "options.h"

C_BEGIN

/* Writes DIR, which must not exist or be empty, from a model with loaded parameters. The folder is complete or not
 * there. 0, or -1 with the reason. */
int export_model(Model *model, const char *dir, ExportFormat format, Error *error);

C_END
#endif
