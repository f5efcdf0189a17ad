// Package output prints the answers of the mesh in the form that the person chose: a table that fits the terminal,
// JSON, YAML or names, and JSON through an expression of --jq.
//
// A View lists the columns of a message; the packages of the commands declare the views of their objects. This package
// does not know what the messages mean, and reads nothing from the mesh.
//
// Guarantees: output to a pipe has no colours and no decoration, does not depend on a width, and has whole ids; the key
// columns of a table are never cut; a failed write is an error.
package output
