// Package judge decides about a node identity from what an agent presents and what the database has of the node:
// whether a session may be opened, confirmed or is a copy's, and whether a node that enrols with a recovery token is
// the node that it was.
//
// It reads no database and no clock: identity reads the row under its lock, asks here, and writes what follows. A test
// explores every state that losses, crashes and copies can lead to, by these very functions.
package judge
