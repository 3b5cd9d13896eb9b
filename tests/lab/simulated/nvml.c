/* A stand-in for NVIDIA's management library, for tests: there is no GPU behind it (see gpus.py).
 *
 * It reads /etc/gangline-lab/gpus when it is initialised: lines "key=value"; a line "gpu" begins the next card. A function
 * whose key is missing there says NOT_SUPPORTED, one that is not written here is not found, as in an old driver.
 * Signatures and numbers are those of NVML's public interface.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILE_NAME "/etc/gangline-lab/gpus"
#define MAX_CARDS 64
#define MAX_TEXT 65536

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9, LOST = 15 };

typedef unsigned long long u64;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } Process;

/* Whoever loads this can see that it is not the real one. */
const char gangline_simulated[] = "simulated GPUs of gangline's lab";

static char text[MAX_TEXT];
static char *cards[MAX_CARDS];
static unsigned num_cards;
static int initialized;

static int load(void) {
    FILE *file = fopen(FILE_NAME, "r");
    if (!file) return NOT_LOADED;
    size_t size = fread(text, 1, MAX_TEXT - 1, file);
    fclose(file);
    text[size] = 0;
    num_cards = 0;
    for (char *line = text; line; line = strchr(line, '\n')) {
        if (*line == '\n') *line++ = 0;
        if (!strncmp(line, "gpu\n", 4) && num_cards < MAX_CARDS) cards[num_cards++] = line + 4;
    }
    return OK;
}

/* The value of a key: lines are C strings one after the other, a section ends with "gpu" or an empty one. */
static const char *find(const char *section, const char *key) {
    size_t length = strlen(key);
    for (const char *line = section; *line && strcmp(line, "gpu"); line += strlen(line) + 1)
        if (!strncmp(line, key, length) && line[length] == '=') return line + length + 1;
    return NULL;
}

static int number(const void *card, const char *key, u64 *value) {
    const char *found;
    if (!initialized) return UNINITIALIZED;
    if (!card) return INVALID;
    if (find(card, "lost")) return LOST;
    if (!(found = find(card, key))) return NOT_SUPPORTED;
    *value = strtoull(found, NULL, 0);
    return OK;
}

static int small(const void *card, const char *key, unsigned *value) {
    u64 wide;
    int error = number(card, key, &wide);
    if (!error) *value = (unsigned)wide;
    return error;
}

static int words(const char *section, const char *key, char *buffer, unsigned size) {
    const char *found;
    if (!initialized) return UNINITIALIZED;
    if (find(section, "lost")) return LOST;
    if (!(found = find(section, key))) return NOT_SUPPORTED;
    if (strlen(found) >= size) return TOO_SMALL;
    strcpy(buffer, found);
    return OK;
}

int nvmlInit_v2(void) {
    int error = load();
    const char *refusal = error ? NULL : find(text, "error");
    if (error || (refusal && atoi(refusal))) return error ? error : atoi(refusal);
    initialized = 1;
    return OK;
}
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { initialized = 0; return OK; }

const char *nvmlErrorString(int error) {
    switch (error) {
        case OK: return "Success";
        case UNINITIALIZED: return "Uninitialized";
        case INVALID: return "Invalid Argument";
        case NOT_SUPPORTED: return "Not Supported";
        case 4: return "Insufficient Permissions";
        case NOT_FOUND: return "Not Found";
        case TOO_SMALL: return "Insufficient Size";
        case NOT_LOADED: return "Driver Not Loaded";
        case LOST: return "GPU is lost";
        case 18: return "Driver/library version mismatch";
        default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *buffer, unsigned size) { return words(text, "driver", buffer, size); }
int nvmlSystemGetNVMLVersion(char *buffer, unsigned size) { return words(text, "nvml", buffer, size); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    const char *found = find(text, "cuda");
    if (!found) return NOT_SUPPORTED;
    *version = atoi(found);
    return OK;
}
int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!initialized) return UNINITIALIZED;
    *count = num_cards;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **card) {
    if (!initialized) return UNINITIALIZED;
    if (index >= num_cards) return INVALID;
    if (find(cards[index], "lost")) return LOST;
    *card = cards[index];
    return OK;
}
static int by_text(const char *key, const char *value, void **card) {
    for (unsigned index = 0; index < num_cards; index++) {
        const char *found = find(cards[index], key);
        if (found && !strcasecmp(found, value)) return nvmlDeviceGetHandleByIndex_v2(index, card);
    }
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **card) { return by_text("uuid", uuid, card); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **card) { return by_text("bus_id", bus_id, card); }
int nvmlDeviceGetIndex(void *card, unsigned *index) {
    for (*index = 0; *index < num_cards; ++*index)
        if (cards[*index] == card) return OK;
    return INVALID;
}
int nvmlDeviceGetMinorNumber(void *card, unsigned *index) { return nvmlDeviceGetIndex(card, index); }

int nvmlDeviceGetName(void *card, char *buffer, unsigned size) { return words(card, "name", buffer, size); }
int nvmlDeviceGetUUID(void *card, char *buffer, unsigned size) { return words(card, "uuid", buffer, size); }

int nvmlDeviceGetMemoryInfo(void *card, Memory *memory) {
    int error = number(card, "memory_total", &memory->total);
    if (!error) error = number(card, "memory_used", &memory->used);
    if (!error) memory->free = memory->total - memory->used;
    return error;
}
int nvmlDeviceGetMemoryInfo_v2(void *card, Memory2 *memory) {
    Memory plain;
    int error = nvmlDeviceGetMemoryInfo(card, &plain);
    if (!error) memory->total = plain.total, memory->free = plain.free, memory->used = plain.used, memory->reserved = 0;
    return error;
}
int nvmlDeviceGetUtilizationRates(void *card, Rates *rates) {
    rates->memory = 0;
    return small(card, "utilization", &rates->gpu);
}
int nvmlDeviceGetTemperature(void *card, unsigned sensor, unsigned *value) {
    return sensor ? INVALID : small(card, "temperature", value);
}
int nvmlDeviceGetCudaComputeCapability(void *card, int *major, int *minor) {
    unsigned both;
    int error = small(card, "compute_capability", &both);
    if (!error) *major = (int)both / 10, *minor = (int)both % 10;
    return error;
}
int nvmlDeviceGetPciInfo_v3(void *card, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    int error = words(card, "bus_id", pci->bus_id, sizeof pci->bus_id);
    if (error) return error;
    sscanf(pci->bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->legacy, sizeof pci->legacy, "%04x:%02x:%02x.0", pci->domain & 0xffff, pci->bus & 0xff, pci->device & 0xff);
    return OK;
}
int nvmlDeviceGetCurrPcieLinkGeneration(void *card, unsigned *value) { return small(card, "pcie_generation", value); }
int nvmlDeviceGetMaxPcieLinkGeneration(void *card, unsigned *value) { return small(card, "pcie_generation_max", value); }
int nvmlDeviceGetCurrPcieLinkWidth(void *card, unsigned *value) { return small(card, "pcie_width", value); }
int nvmlDeviceGetMaxPcieLinkWidth(void *card, unsigned *value) { return small(card, "pcie_width_max", value); }
int nvmlDeviceGetPowerUsage(void *card, unsigned *value) { return small(card, "power", value); }
int nvmlDeviceGetEnforcedPowerLimit(void *card, unsigned *value) { return small(card, "power_limit", value); }
int nvmlDeviceGetPowerManagementLimit(void *card, unsigned *value) { return small(card, "power_limit", value); }
int nvmlDeviceGetPersistenceMode(void *card, unsigned *value) { return small(card, "persistence", value); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *card, u64 *value) { return number(card, "throttle", value); }
int nvmlDeviceGetCurrentClocksEventReasons(void *card, u64 *value) { return number(card, "throttle", value); }
int nvmlDeviceGetTotalEccErrors(void *card, unsigned kind, unsigned counter, u64 *value) {
    static const char *keys[2][2] = {
        {"ecc_corrected", "ecc_corrected_ever"},
        {"ecc_uncorrected", "ecc_uncorrected_ever"},
    };
    return kind > 1 || counter > 1 ? INVALID : number(card, keys[kind][counter], value);
}
int nvmlDeviceGetEccMode(void *card, unsigned *now, unsigned *later) {
    u64 errors;
    int error = number(card, "ecc_uncorrected", &errors);
    if (!error) *now = *later = 1;
    return error;
}
int nvmlDeviceGetMigMode(void *card, unsigned *now, unsigned *later) {
    int error = small(card, "mig", now);
    if (!error) *later = *now;
    return error;
}

/* processes=pid:bytes,pid:bytes */
int nvmlDeviceGetComputeRunningProcesses_v3(void *card, unsigned *count, Process *processes) {
    u64 present;
    unsigned room = *count;
    int error = number(card, "memory_total", &present);
    const char *rest = error ? NULL : find(card, "processes");
    if (error) return error;
    for (*count = 0; rest && *rest; ++*count) {
        Process process = {0, 0, 0xffffffff, 0xffffffff};
        int length = 0;
        if (sscanf(rest, "%u:%llu%n", &process.pid, &process.used, &length) < 2) break;
        if (*count < room) processes[*count] = process;
        rest += length;
        if (*rest == ',') rest++;
    }
    return *count > room ? TOO_SMALL : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *card, unsigned *count, Process *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(card, count, processes);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *card, unsigned *count, Process *processes) {
    (void)card, (void)processes;
    *count = 0;
    return OK;
}
