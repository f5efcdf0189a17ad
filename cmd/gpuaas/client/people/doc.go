// Package people has the commands about the people who may call the mesh.
//
// The token of a new person is written into a context or a directory and is printed nowhere. A person whose token could
// not be written is ended again. A context whose token is still valid is never overwritten.
package people
