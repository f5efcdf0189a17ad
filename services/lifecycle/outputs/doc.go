// Package outputs decides who may read what a workload writes, and from which replica of nodeapi it is read. It serves
// OutputService. It stores no output, and changes nothing.
package outputs
