# Writes build_identity.cpp: cmake -DTOP=folder -DLIST=file -DVERSION=v -DCOMPILER=name
# -DOPTIONS=text -DOUTPUT=file -P hash_sources.cmake. LIST has a source a line, relative to TOP. The
# fingerprint is of names and contents, so that equal sources have the same one in any folder, with
# or without git.
file(STRINGS ${LIST} sources)
set(hashes "")
foreach(source ${sources})
  file(SHA256 ${TOP}/${source} hash)
  string(APPEND hashes "${source} ${hash}\n")
endforeach()
string(SHA256 hash "${hashes}")
string(SUBSTRING ${hash} 0 16 hash)
string(REGEX REPLACE " +" " " OPTIONS "${OPTIONS}")
string(STRIP "${OPTIONS}" OPTIONS)
string(REPLACE "\\" "\\\\" OPTIONS "${OPTIONS}")
string(REPLACE "\"" "\\\"" OPTIONS "${OPTIONS}")
file(WRITE ${OUTPUT} "#include \"runtime/plugin/build_identity.h\"

namespace parplan {

BuildIdentity build_identity() {
  return {.version = \"${VERSION}\", .sources = \"${hash}\", .compiler = \"${COMPILER}\", .options = \"${OPTIONS}\"};
}

}  // namespace parplan
")
