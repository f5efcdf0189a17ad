// Package scan reads tables a page of ids at a time, so that no statement of a sweep grows with the fleet. Pages
// contain every id, also ids without a row.
//
// It knows the tables and their ids, and nothing of what is looked for in them.
package scan
