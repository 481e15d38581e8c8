/* A libnvidia-ml.so.1 for tests: two cards whose data come from the environment, so that the real binding, NVIDIA's
 * pynvml, and ctypes under it are what is tried. Layouts are those of nvml.h.
 *
 * NVML_INIT       what nvmlInit returns
 * NVML_NAME       name of the cards
 * NVML_PIDS       process ids with a compute context on card 0, by commas
 * NVML_SET        what setting a power limit returns
 * NVML_CRASH      reading the power of card 1 ends the process
 *
 * Built with -DONLY_V2 it lacks the third version of the process lists, with -DONLY_V1 the second too, and with
 * -DOLD_NAMES it has the throttle reasons under their old name.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct card { int number; u32 limit_mw; } *device;

static struct card cards[2] = {{0, 450000}, {1, 450000}};

static int number_in(const char *variable) {
    const char *text = getenv(variable);
    return text == NULL ? 0 : atoi(text);
}

int nvmlInitWithFlags(u32 flags) { (void)flags; return number_in("NVML_INIT"); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake library"; }
int nvmlSystemGetDriverVersion(char *text, u32 size) { snprintf(text, size, "580.65.06"); return OK; }
int nvmlDeviceGetCount_v2(u32 *count) { *count = 2; return OK; }

int nvmlDeviceGetHandleByIndex_v2(u32 index, device *handle) {
    if (index > 1) return INVALID_ARGUMENT;
    *handle = &cards[index];
    return OK;
}

int nvmlDeviceGetUUID(device card, char *text, u32 size) { snprintf(text, size, "GPU-%d", card->number); return OK; }

int nvmlDeviceGetHandleByUUID(const char *uuid, device *handle) {
    if (strcmp(uuid, "GPU-0") == 0) *handle = &cards[0];
    else if (strcmp(uuid, "GPU-1") == 0) *handle = &cards[1];
    else return NOT_FOUND;
    return OK;
}

int nvmlDeviceGetName(device card, char *text, u32 size) {
    (void)card;
    const char *name = getenv("NVML_NAME");
    snprintf(text, size, "%s", name == NULL ? "NVIDIA GeForce RTX 4090" : name);
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(device card, int *major, int *minor) {
    (void)card;
    *major = 8;
    *minor = 9;
    return OK;
}

struct pci { char legacy[16]; u32 domain, bus, device, device_id, subsystem_id; char bus_id[32]; };

int nvmlDeviceGetPciInfo_v3(device card, struct pci *info) {
    memset(info, 0, sizeof *info);
    info->bus = (u32)card->number + 1;
    return OK;
}

struct memory { u64 total, free, used; };
struct memory_v2 { u32 version; u64 total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo(device card, struct memory *memory) {
    (void)card;
    *memory = (struct memory){24ULL << 30, 20ULL << 30, 4ULL << 30};
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(device card, struct memory_v2 *memory) {
    (void)card;
    if (memory->version != 0x02000028) return 25;
    *memory = (struct memory_v2){memory->version, 24ULL << 30, 1ULL << 30, 20ULL << 30, 3ULL << 30};
    return OK;
}

int nvmlDeviceGetPowerUsage(device card, u32 *mw) {
    if (card->number == 1 && getenv("NVML_CRASH") != NULL) abort();
    *mw = 61500;
    return OK;
}

int nvmlDeviceGetEnforcedPowerLimit(device card, u32 *mw) { *mw = card->limit_mw; return OK; }
int nvmlDeviceGetPowerManagementLimit(device card, u32 *mw) { *mw = card->limit_mw; return OK; }
int nvmlDeviceGetPowerManagementDefaultLimit(device card, u32 *mw) { (void)card; *mw = 450000; return OK; }

int nvmlDeviceGetPowerManagementLimitConstraints(device card, u32 *least_mw, u32 *most_mw) {
    (void)card;
    *least_mw = 150000;
    *most_mw = 600000;
    return OK;
}

int nvmlDeviceSetPowerManagementLimit(device card, u32 mw) {
    if (number_in("NVML_SET") != OK) return number_in("NVML_SET");
    if (mw < 150000 || mw > 600000) return INVALID_ARGUMENT;
    card->limit_mw = mw;
    return OK;
}

int nvmlDeviceGetTotalEnergyConsumption(device card, u64 *mj) { (void)card; *mj = 123456789; return OK; }

struct temperature { u32 version, sensor; int celsius; };

int nvmlDeviceGetTemperatureV(device card, struct temperature *temperature) {
    (void)card;
    temperature->celsius = 41;
    return OK;
}

int nvmlDeviceGetTemperatureThreshold(device card, u32 threshold, u32 *celsius) {
    (void)card;
    *celsius = threshold == 1 ? 95 : 98;
    return OK;
}

int nvmlDeviceGetClockInfo(device card, u32 kind, u32 *mhz) { (void)card; *mhz = kind == 0 ? 2520 : 10501; return OK; }
int nvmlDeviceGetUtilizationRates(device card, u32 rates[2]) { (void)card; rates[0] = 3; rates[1] = 0; return OK; }
int nvmlDeviceGetCurrPcieLinkGeneration(device card, u32 *value) { (void)card; *value = 1; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(device card, u32 *value) { (void)card; *value = 4; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(device card, u32 *value) { (void)card; *value = 16; return OK; }

#ifdef OLD_NAMES
int nvmlDeviceGetCurrentClocksThrottleReasons(device card, u64 *reasons) { (void)card; *reasons = 0x40; return OK; }
#else
int nvmlDeviceGetCurrentClocksEventReasons(device card, u64 *reasons) { (void)card; *reasons = 0x40; return OK; }
#endif

struct process { u32 pid; u64 memory; u32 instance, compute_instance; };
struct process_v1 { u32 pid; u64 memory; };

/* Writes up to *count pids of NVML_PIDS, as the library does: too short a list is told by its wanted length. */
static int list(device card, u32 *count, void *rows, int first_version) {
    const char *text = getenv("NVML_PIDS");
    u32 pids[64], found = 0;
    while (card->number == 0 && text != NULL && *text != '\0' && found < 64) {
        char *end;
        pids[found++] = (u32)strtoul(text, &end, 10);
        text = *end == ',' ? end + 1 : end;
    }
    u32 room = *count;
    *count = found;
    if (found == 0) return OK;
    if (rows == NULL || room < found) return INSUFFICIENT_SIZE;
    for (u32 place = 0; place < found; place++) {
        if (first_version) ((struct process_v1 *)rows)[place] = (struct process_v1){pids[place], 1ULL << 30};
        else ((struct process *)rows)[place] = (struct process){pids[place], 1ULL << 30, 0xffffffff, 0xffffffff};
    }
    return OK;
}

#ifdef ONLY_V1
int nvmlDeviceGetComputeRunningProcesses(device card, u32 *count, void *rows) { return list(card, count, rows, 1); }
int nvmlDeviceGetGraphicsRunningProcesses(device card, u32 *count, void *rows) {
    (void)card; (void)rows;
    *count = 0;
    return OK;
}
#else
int nvmlDeviceGetComputeRunningProcesses_v2(device card, u32 *count, void *rows) { return list(card, count, rows, 0); }
int nvmlDeviceGetGraphicsRunningProcesses_v2(device card, u32 *count, void *rows) {
    (void)card; (void)rows;
    *count = 0;
    return OK;
}
#ifndef ONLY_V2
int nvmlDeviceGetComputeRunningProcesses_v3(device card, u32 *count, void *rows) { return list(card, count, rows, 0); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(device card, u32 *count, void *rows) {
    (void)card; (void)rows;
    *count = 0;
    return OK;
}
#endif
#endif
