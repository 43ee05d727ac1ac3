/* oneDNN, versions 2 and 3, for bench_gemm; without LLMC_DNNL it is not there. */
#include "peers.h"

#ifdef LLMC_DNNL
#include <oneapi/dnnl/dnnl.h>

static struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_primitive_t matmul;
    dnnl_memory_t a, b, c;
} dnnl;

static void ok(dnnl_status_t status, const char *what)
{
    if (status != dnnl_success) die("oneDNN: %s: status %d", what, (int)status);
}

#if DNNL_VERSION_MAJOR >= 3 /* descriptors are handles */
typedef dnnl_memory_desc_t Desc;
typedef const_dnnl_memory_desc_t ConstDesc;
static ConstDesc at(const Desc *d) { return *d; }

static Desc describe(int64_t rows, int64_t cols, DType dtype, dnnl_format_tag_t tag)
{
    Desc d;
    ok(dnnl_memory_desc_create_with_tag(&d, 2, (dnnl_dims_t){rows, cols}, dtype == DTYPE_BF16 ? dnnl_bf16 : dnnl_f32,
                                        tag),
       "memory descriptor");
    return d;
}

static void forget(Desc *d) { dnnl_memory_desc_destroy(*d); }

static dnnl_status_t matmul_desc(dnnl_primitive_desc_t *out, ConstDesc a, ConstDesc b, ConstDesc c)
{
    return dnnl_matmul_primitive_desc_create(out, dnnl.engine, a, b, NULL, c, NULL);
}
#else
typedef dnnl_memory_desc_t Desc;
typedef const dnnl_memory_desc_t *ConstDesc;
static ConstDesc at(const Desc *d) { return d; }

static Desc describe(int64_t rows, int64_t cols, DType dtype, dnnl_format_tag_t tag)
{
    Desc d;
    ok(dnnl_memory_desc_init_by_tag(&d, 2, (dnnl_dims_t){rows, cols}, dtype == DTYPE_BF16 ? dnnl_bf16 : dnnl_f32, tag),
       "memory descriptor");
    return d;
}

static void forget(Desc *d) { (void)d; }

static dnnl_status_t matmul_desc(dnnl_primitive_desc_t *out, ConstDesc a, ConstDesc b, ConstDesc c)
{
    dnnl_matmul_desc_t d;
    ok(dnnl_matmul_desc_init(&d, a, b, NULL, c), "matmul descriptor");
    return dnnl_primitive_desc_create(out, &d, NULL, dnnl.engine, NULL);
}
#endif

bool dnnl_there(void) { return true; }

static dnnl_memory_t memory(ConstDesc desc, void *data)
{
    dnnl_memory_t m;
    ok(dnnl_memory_create(&m, desc, dnnl.engine, data), "memory");
    return m;
}

static void run(dnnl_primitive_t primitive, const dnnl_exec_arg_t *arguments, int count)
{
    ok(dnnl_primitive_execute(primitive, dnnl.stream, count, arguments), "execute");
    ok(dnnl_stream_wait(dnnl.stream), "wait");
}

/* b as it stands in memory, [N, K] rows, into the layout that the product asks for. */
static void pack(const Desc *plain, ConstDesc packed, void *data)
{
    dnnl_primitive_desc_t desc;
    dnnl_primitive_t reorder;
    dnnl_memory_t from = memory(at(plain), data);
    dnnl.b = memory(packed, DNNL_MEMORY_ALLOCATE);
    ok(dnnl_reorder_primitive_desc_create(&desc, at(plain), dnnl.engine, packed, dnnl.engine, NULL), "reorder");
    ok(dnnl_primitive_create(&reorder, desc), "reorder");
    run(reorder, (dnnl_exec_arg_t[]){{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, dnnl.b}}, 2);
    dnnl_primitive_destroy(reorder);
    dnnl_primitive_desc_destroy(desc);
    dnnl_memory_destroy(from);
}

bool dnnl_open(const char *isa, const Product *p)
{
    (void)isa;
    dnnl_primitive_desc_t desc;
    if (!dnnl.engine) {
        ok(dnnl_engine_create(&dnnl.engine, dnnl_cpu, 0), "engine");
        ok(dnnl_stream_create(&dnnl.stream, dnnl.engine, dnnl_stream_default_flags), "stream");
    }
    Desc a = describe(p->M, p->K, p->in, dnnl_ab), c = describe(p->M, p->N, p->out, dnnl_ab);
    Desc b = describe(p->K, p->N, p->in, dnnl_ba), any = describe(p->K, p->N, p->in, dnnl_format_tag_any);
    bool can = matmul_desc(&desc, at(&a), at(&any), at(&c)) == dnnl_success; /* BF16 needs AVX-512 in some versions */
    if (can) {
        pack(&b, dnnl_primitive_desc_query_md(desc, dnnl_query_weights_md, 0), p->b);
        dnnl.a = memory(at(&a), p->a);
        dnnl.c = memory(at(&c), p->c);
        ok(dnnl_primitive_create(&dnnl.matmul, desc), "matmul");
        dnnl_primitive_desc_destroy(desc);
    }
    forget(&a), forget(&b), forget(&c), forget(&any);
    return can;
}

void dnnl_run(const Product *p)
{
    (void)p;
    run(dnnl.matmul, (dnnl_exec_arg_t[]){{DNNL_ARG_SRC, dnnl.a}, {DNNL_ARG_WEIGHTS, dnnl.b}, {DNNL_ARG_DST, dnnl.c}},
        3);
}

void dnnl_close(void)
{
    dnnl_primitive_destroy(dnnl.matmul);
    dnnl_memory_destroy(dnnl.a);
    dnnl_memory_destroy(dnnl.b);
    dnnl_memory_destroy(dnnl.c);
}

#else
bool dnnl_there(void) { return false; }
bool dnnl_open(const char *isa, const Product *p) { return (void)isa, (void)p, false; }
void dnnl_run(const Product *p) { (void)p; }
void dnnl_close(void) {}
#endif
