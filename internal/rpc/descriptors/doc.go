// Package descriptors makes the descriptors that a port's reflection serves: those of the services that are offered,
// with the types that these need, and of no other service that the process knows.
package descriptors
