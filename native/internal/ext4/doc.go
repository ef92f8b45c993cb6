// Package ext4 is a read-write ext4 file system on a blockdev.Device.
package ext4
