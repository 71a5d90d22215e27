// A plugin of another version than any.
extern "C" __attribute__((visibility("default"))) void* parplan_make_gpu(const char*) { return nullptr; }
