// Package statements holds the test that prepares every SQL statement of the product as the role that runs it.
package statements
