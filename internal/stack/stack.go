// Package stack makes room on the stacks of goroutines that are about to need it.
//
// A goroutine begins with a small stack, which doubles each time that it is used up, and each time all frames are
// copied and their pointers adjusted. A TLS handshake takes four such steps, of ever more frames.
package stack

// room is what Grow makes sure of: what a handshake or the opening of a session needs.
const room = 14 << 10

// Grow makes the stack of the calling goroutine large enough for a handshake or an opening, in one step. A goroutine
// that waits for long gets its memory back at the collections of garbage after that.
//
//go:noinline
func Grow() {
	var frame [room]byte
	touch(&frame)
}

// touch keeps the compiler from leaving out the frame.
//
//go:noinline
func touch(frame *[room]byte) { frame[0] = 1 }
