// Package tokens owns the rows of recovery tokens, how old one may be, and the decisions of people about them.
//
// A recovery token lets a node enrol again by itself, with the proof of the node's recovery key. Package enrol redeems
// it; this package never decides whether a caller is the node. It believes only rows and the database's clock. The text
// of a token is stored nowhere: it is signed anew from its row.
//
// Guarantees: the age of a token counts from the first session that was ready on the certificate that came with it, and
// until then from its issue; the times in which we issued nothing, each once, do not count; an extension of its profile
// is weighed when a token is judged, and changes no row of a token. Each decision of a person is one transaction with
// its audit entry.
package tokens
