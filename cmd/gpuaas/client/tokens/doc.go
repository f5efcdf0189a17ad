// Package tokens has the commands about the recovery tokens of nodes.
//
// The text of a token is printed nowhere: the mesh does not keep it.
package tokens
