/* Answers like NVML on one H100. FAKE_NVML_INIT=code, _CRASH, _HANG, _LOST, _OLD make it fail. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB (1024ULL * 1024ULL)
#define NOT_SUPPORTED 3
#define INSUFFICIENT_SIZE 7
#define GPU_IS_LOST 15

static int on(const char *name) { return getenv(name) != NULL; }
static int old(void) { return on("FAKE_NVML_OLD") ? NOT_SUPPORTED : 0; }
static int say(char *to, unsigned size, const char *text) { strncpy(to, text, size); return 0; }

const char *nvmlErrorString(int code)
{
    switch (code) {
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlInit_v2(void)
{
    if (on("FAKE_NVML_CRASH")) *(volatile int *)0 = 1;
    if (on("FAKE_NVML_HANG")) sleep(600);
    return on("FAKE_NVML_INIT") ? atoi(getenv("FAKE_NVML_INIT")) : 0;
}

int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) { return say(to, size, "580.159.04"); }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d)
{
    *d = (void *)(size_t)(i + 1);
    return on("FAKE_NVML_LOST") ? GPU_IS_LOST : 0;
}
int nvmlDeviceGetUUID(void *d, char *to, unsigned size)
{
    return say(to, size, "GPU-00000000-1111-2222-3333-444444444444");
}
int nvmlDeviceGetName(void *d, char *to, unsigned size) { return say(to, size, "NVIDIA H100 80GB HBM3"); }
int nvmlDeviceGetMinorNumber(void *d, unsigned *v) { *v = 0; return 0; }

struct memory2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *d, struct memory2 *m)
{
    if (old()) return NOT_SUPPORTED;
    if (m->version != (sizeof *m | 2 << 24)) return 2;
    m->total = 81559 * MIB; m->reserved = 480 * MIB; m->free = 80055 * MIB; m->used = 1024 * MIB;
    return 0;
}
struct memory1 { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *d, struct memory1 *m)
{
    m->total = 81559 * MIB; m->free = 80055 * MIB; m->used = 1504 * MIB;
    return 0;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *d, struct pci *p) { return say(p->bus_id, 32, "00000000:00:06.0"); }
int nvmlDeviceGetCudaComputeCapability(void *d, int *a, int *b) { *a = 9; *b = 0; return 0; }
int nvmlDeviceGetComputeMode(void *d, unsigned *v) { *v = 0; return 0; }
int nvmlDeviceGetPersistenceMode(void *d, unsigned *v) { *v = 1; return 0; }
int nvmlDeviceGetMigMode(void *d, unsigned *a, unsigned *b) { *a = *b = 0; return old(); }
int nvmlDeviceGetEccMode(void *d, unsigned *a, unsigned *b) { *a = *b = 1; return old(); }
int nvmlDeviceGetTotalEccErrors(void *d, int kind, int which, unsigned long long *v)
{
    *v = kind == 0 ? 2 : 0;
    return old();
}
int nvmlDeviceGetRemappedRows(void *d, unsigned *a, unsigned *b, unsigned *pending, unsigned *failed)
{
    *a = *b = *failed = 0; *pending = 1;
    return old();
}
int nvmlDeviceGetPowerUsage(void *d, unsigned *v) { *v = 96990; return 0; }
int nvmlDeviceGetPowerManagementLimit(void *d, unsigned *v) { *v = 700000; return 0; }
int nvmlDeviceGetPowerManagementDefaultLimit(void *d, unsigned *v) { *v = 700000; return old(); }
int nvmlDeviceGetCurrPcieLinkGeneration(void *d, unsigned *v) { *v = 5; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(void *d, unsigned *v) { *v = 16; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, unsigned *v) { *v = 16; return 0; }
int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *v) { *v = 34; return 0; }

struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, struct process *table)
{
    if (table == NULL || *n < 1) { *n = 1; return INSUFFICIENT_SIZE; }
    *n = 1; table[0].pid = 4242; table[0].used = 1024 * MIB;
    return 0;
}
