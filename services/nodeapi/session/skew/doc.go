// Package skew measures the database's clock at a replica of nodeapi, and by it how far the clocks of agents' hosts are
// off.
package skew
