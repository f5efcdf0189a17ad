// Package list decides which rows a caller gets of a list: whose rows, by the scope of the caller; which of them, by
// the conditions of the request; in which order; and how many, by page.
//
// It composes the statements of lists and the tokens of their pages. It knows no list: a package that has one describes
// it by a Layout and runs the statement.
//
// Guarantees: a Scope that was not set includes no rows. A statement has no condition that its layout does not name. A
// page token grants no rights, and an object of another tenant is refused exactly as one that does not exist.
package list
