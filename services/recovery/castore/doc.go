// Package castore deletes expired rows of the embedded authority's own database.
//
// The authority never deletes: a row for each certificate that it signed and for each token that it used stays. This
// package makes, in that database, functions that cut what has reached the end of its term, and calls them. It relies
// on the rows' own content: a certificate's end, a token's expiry, the end of a revoked certificate.
//
// Guarantees: a certificate, a token or a revocation that is still valid is not cut, whatever a caller asks for, and
// neither is a row that cannot be read; nothing else in the database is touched (provisioners, administrators, the list
// of revocations). The functions belong to a role that cannot log in and may delete from those four tables alone. A
// batch is found by an index over the ends, so that its cost follows what is cut and not what is kept. The index of a
// large table is made by periodic work of its own, without a bound of time; until it is there the cut fails and says
// how far it is. Functions and indexes of a later version are never replaced.
package castore
