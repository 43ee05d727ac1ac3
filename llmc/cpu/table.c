/* The table of operations of one instruction set: what backend.c chooses from. The entries that need no vector code are
 * filled there.
 */
#include "cpu.h"

const CpuTable cpu_table = {
    .ops = {.copy = cpu_copy,
            .operand_from_tensor = cpu_operand_from_tensor,
            .operand_from_norm = cpu_operand_from_norm,
            .operand_from_activation = cpu_operand_from_activation,
            .operand_from_gradient = cpu_operand_from_gradient,
            .operand_from_activation_backward = cpu_operand_from_activation_backward,
            .linear_forward = cpu_linear_forward,
            .linear_backward_input = cpu_linear_backward_input,
            .linear_backward_weight = cpu_linear_backward_weight,
            .weight_prepare = cpu_weight_prepare,
            .weight_amax = cpu_weight_amax,
            .weight_pack = cpu_weight_pack,
            .embedding_forward = cpu_embedding_forward,
            .embedding_backward = cpu_embedding_backward,
            .residual_add = cpu_residual_add,
            .norm_backward = cpu_norm_backward,
            .qk_norm_rope_forward = cpu_qk_norm_rope_forward,
            .qk_norm_rope_backward = cpu_qk_norm_rope_backward,
            .attention_forward = cpu_attention_forward,
            .attention_backward = cpu_attention_backward,
            .softmax_cross_entropy = cpu_softmax_cross_entropy,
            .add = cpu_add,
            .sum_squares = cpu_sum_squares,
            .adamw = cpu_adamw},
    .gemm = {&ISA_NAME(gemm_kernel_fp32), &ISA_NAME(gemm_kernel_bf16)},
    .attention_bytes = attention_workspace_bytes,
};
