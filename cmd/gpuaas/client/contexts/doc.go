// Package contexts owns the file in which a person keeps which mesh to talk to, how to trust it, and who they are there.
//
// The file holds bearer tokens. So it is written with mode 0600, replaced in one step and durably, changed under a lock so that two writers (a
// `gpuaas dev` that starts and a person who switches) both get their change, and refused when others may read it: a token that somebody else could
// have read is no longer proof of who asks. It believes nothing it reads: an unknown key, a context twice, or a current context that is not there
// is an error that names the file.
package contexts
