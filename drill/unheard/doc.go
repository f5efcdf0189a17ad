// Package unheard has the drills of agents that reach no API: their endpoints, their trust or the way to them is wrong.
// What is wrong is in the records of their hosts, which a person brings.
package unheard
