"""`horovod`: Horovod's averaging of gradients."""
