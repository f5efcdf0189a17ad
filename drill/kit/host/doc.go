// Package host reads and changes the host that a mesh runs on: processes as the kernel shows them, the launch log of
// the process placement, the directories of instances, and file systems.
//
// It shares no code with the detectors of faults, nor with the driver whose launch log it reads: what it finds is the
// evidence that a fault took effect. It therefore imports no service, no agent and nothing that composes a mesh.
package host
