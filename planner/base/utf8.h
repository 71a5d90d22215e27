#pragma once

#include <string>

namespace parplan {

// Throws ConfigError with the place of the first byte of `text` that is not UTF-8 (RFC 3629: no
// overlong forms, no surrogates), or that begins a non-character (U+0000, U+FFFE). Libraries pass
// broken UTF-8 on, and files written from it later (JSON, a plan) could not be read back.
void check_utf8(const std::string& text, const std::string& file_name);

}  // namespace parplan
