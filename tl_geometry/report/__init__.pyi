from .analysis import TITLES as TITLES
from .analysis import Analysis as Analysis
from .analysis import make as make
from .analysis import versions as versions
from .analysis import write as write
from .budget import Budget as Budget
from .contents import SECTIONS as SECTIONS
from .folder import Folder as Folder
from .section import Card as Card
from .section import Draft as Draft
from .section import Section as Section

__all__: list[str]
