// Package contexts owns the contexts file: for each mesh of a person the server, the authority to trust, and the token
// of the person there.
//
// Because the file holds bearer tokens, it is written with mode 0600, replaced in one step and durably, changed under a
// lock so that two writers (a `gpuaas dev` that starts and a person who switches) both get their change, and refused
// when others may read it: a token that another user could have read does not prove who sends it. The content is
// validated: an unknown key, a context twice, or a current context that does not exist is an error that names the file.
package contexts
