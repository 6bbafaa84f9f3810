"""A sandbox for several cells: what one names, the next one knows."""

from cove.e2b import CodeInterpreter

desk = CodeInterpreter()
desk.notebook.exec_cell("basket = ['pear']")
desk.notebook.exec_cell("basket += ['plum']")
basket = desk.notebook.exec_cell("print(*basket)").logs.stdout
desk.close()
