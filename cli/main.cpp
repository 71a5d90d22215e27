#include <cstdio>

#include "cli/version.h"

int main() { std::printf("parplan %s\n", parplan::version()); }
