/* What Nsight Systems is to NVTX: a library that NVTX loads (NVTX_INJECTION64_PATH) and calls with each domain and range.
   It prints them.  Numbers of functions and layouts are those of NVTX 3, whose headers are not installed here. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef void (*function)(void);

struct callbacks {
  size_t size;
  int (*functions)(int module, function*** table, unsigned* count);
};

struct attributes {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const char* message; /* of a registered string what register_string() gave: the text, too */
};

static void* create_domain(const char* name) {
  fprintf(stderr, "domain %s\n", name);
  return strdup(name);
}

static void* register_string(void* domain, const char* text) {
  (void)domain;
  return strdup(text);
}

static int push(void* domain, const struct attributes* of) {
  fprintf(stderr, "%s: push %s\n", (const char*)domain, of->message);
  return 0;
}

static int pop(void* domain) {
  fprintf(stderr, "%s: pop\n", (const char*)domain);
  return 0;
}

int InitializeInjectionNvtx2(const void* (*table)(uint32_t)) {
  const struct callbacks* found = table(1);
  function** core = NULL;
  unsigned count = 0;
  if (found == NULL || !found->functions(5, &core, &count) || count < 13) return 0;
  *core[4] = (function)push;
  *core[5] = (function)pop;
  *core[10] = (function)register_string;
  *core[12] = (function)create_domain;
  return 1;
}
